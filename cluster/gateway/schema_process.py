"""The process beside the gateway that compiles schemas (model/schema_check.py), and what its end means.

It is begun with the first schema, and again after an end. An end by a limit that it keeps itself (processor time,
memory) is that schema's; any other end (the kernel was short of memory, somebody killed it) says nothing of the schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

from kvstore.errors import InvalidInput, NoCapacity, Unavailable

FIELD = "sampling_params.json_schema"
# -P: a folder named model where this process stands is not the module.
COMMAND = (sys.executable, "-P", "-m", "model.schema_check")
# How the process ends over what a schema costs: its timer's signal, and the abort of a library that gets no memory.
COSTLY_ENDS = (-signal.SIGPROF, -signal.SIGABRT)
TRIES = 2


class _Ended(Exception):
    """Without an answer."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SchemaProcess:
    """One schema at a time; its user sees to that. Belongs to one event loop."""

    def __init__(self, command: tuple[str, ...], wait_s: float, retry_after_ms: int) -> None:
        """`wait_s`: how long the host may take for one schema, however little processor time it gives the process."""
        self._command = command
        self._wait_s = wait_s
        self._retry_after_ms = retry_after_ms
        self._process: asyncio.subprocess.Process | None = None

    async def problem(self, schema: str) -> InvalidInput | None:
        """Why `schema` cannot be followed; None where it can. Raises what says nothing of the schema:
        NoCapacity where no answer comes in time, Unavailable where this host has no process that would answer."""
        code = 0
        for _try in range(TRIES):
            try:
                return _read(await self._ask(schema))
            except _Ended as ended:
                code = ended.code
            if code in COSTLY_ENDS:
                return InvalidInput(
                    "json_schema_too_complex",
                    f"{FIELD} takes too long to compile; use fewer patterns, alternatives, and smaller multipleOf",
                    field=FIELD,
                )
        raise Unavailable(
            "schema_check_failed", f"the process that checks schemas ended {TRIES} times (code {code})", field=FIELD
        )

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    async def _ask(self, schema: str) -> bytes:
        """A whole line. Raises _Ended, and what `problem` raises."""
        told = b""
        try:
            async with asyncio.timeout(self._wait_s):
                process = await self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(ConnectionError):  # its end shows below
                    process.stdin.write(json.dumps(schema).encode() + b"\n")
                    await process.stdin.drain()
                told = await process.stdout.readline()
                if not told.endswith(b"\n"):
                    told = b""  # it ended within the line
                    raise _Ended(await process.wait())
                return told
        except TimeoutError:
            raise NoCapacity(
                "schema_check_busy",
                f"{FIELD} was not checked within {self._wait_s:.0f} s",
                field=FIELD,
                retry_after_ms=self._retry_after_ms,
            ) from None
        except OSError as error:
            raise Unavailable(
                "schema_check_failed", f"no process to check schemas: {error.strerror}", field=FIELD
            ) from error
        finally:
            if not told:  # what comes yet is not for the next one
                await self.close()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            await self.close()  # it ended between two schemas
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                # Where this process finds its modules, whatever told it.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return self._process


def _read(told: bytes) -> InvalidInput | None:
    answer = json.loads(told)
    return None if answer is None else InvalidInput(answer[0], answer[1], field=FIELD)
