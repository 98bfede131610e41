"""Whether JSON Schemas of requests can be followed, learnt before any worker hears of them.

Compiling one may take seconds, or for ever: it is done in a process beside the gateway (model/schema_check.py), which
is begun with the first schema and ends over one that takes too much. What came out is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections import OrderedDict

from kvstore.errors import InvalidInput, NoCapacity, Unavailable

FIELD = "sampling_params.json_schema"
KEPT = 1024
# The process itself bounds the processor's time; this is for a host that gives it none.
WAIT_S = 20.0
# -P: a folder named model where this process stands is not the module.
_COMMAND = (sys.executable, "-P", "-m", "model.schema_check")


class SchemaCheck:
    """One schema at a time. Made outside of an event loop; `check` and `close` belong to one."""

    def __init__(self, *, command: tuple[str, ...] = _COMMAND, wait_s: float = WAIT_S, kept: int = KEPT) -> None:
        self._command = command
        self._wait_s = wait_s
        self._kept = kept
        self._known: OrderedDict[bytes, InvalidInput | None] = OrderedDict()
        self._one = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def check(self, schema: str) -> None:
        """Raises InvalidInput for a schema that cannot be followed, NoCapacity where the answer takes too long to
        come, Unavailable where this host cannot check any."""
        key = hashlib.blake2b(schema.encode(), digest_size=16).digest()
        if key not in self._known:
            async with self._one:
                if key not in self._known:
                    self._remember(key, await self._ask(schema))
        self._known.move_to_end(key)
        error = self._known[key]
        if error is not None:
            raise InvalidInput(error.reason, error.message, field=error.field)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _remember(self, key: bytes, error: InvalidInput | None) -> None:
        self._known[key] = error
        while len(self._known) > self._kept:
            self._known.popitem(last=False)

    async def _ask(self, schema: str) -> InvalidInput | None:
        told = b""
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            async with asyncio.timeout(self._wait_s):
                process.stdin.write(json.dumps(schema).encode() + b"\n")
                with contextlib.suppress(ConnectionError):  # its end shows below
                    await process.stdin.drain()
                told = await process.stdout.readline()
        except TimeoutError:
            raise NoCapacity(
                "schema_check_busy", f"{FIELD} was not checked within {self._wait_s:.0f} s", field=FIELD
            ) from None
        except OSError as error:
            raise Unavailable("schema_check_failed", f"no process to check schemas: {error.strerror}") from error
        finally:
            if not told:  # also when the caller has left: what comes yet is not for the next one
                await self.close()
        if not told:
            return InvalidInput(
                "json_schema_too_complex",
                f"{FIELD} takes too long to compile; use fewer patterns, alternatives, and smaller multipleOf",
                field=FIELD,
            )
        answer = json.loads(told)
        return None if answer is None else InvalidInput(answer[0], answer[1], field=FIELD)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                # Where this process finds its modules, whatever told it.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return self._process
