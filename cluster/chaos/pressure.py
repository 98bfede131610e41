"""Memory pressure on the host of a chaos run: a balloon beside the workers, for a few seconds."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from cluster.chaos import balloon
from kvstore.errors import Unavailable

PROGRAM = Path(balloon.__file__)
END_S = 10.0  # a balloon whose time is over gives back and ends well within this


class Pressure:
    """`most_mib`: the most that one balloon of this run held."""

    def __init__(self) -> None:
        self.most_mib = 0

    async def squeeze(self, percent: int, seconds: float) -> None:
        """Takes that share of the available memory, as far as the reserve allows, and has given it back when it
        returns, however it returns. Raises Unavailable if the balloon could not be held."""
        process = await asyncio.create_subprocess_exec(
            # Isolated: nothing of the environment or the folder decides what it imports.
            sys.executable, "-I", str(PROGRAM), str(os.getpid()), str(percent), str(seconds),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None, "asked for"
        assert process.stderr is not None, "asked for"
        try:
            async with asyncio.timeout(seconds + END_S):
                # Not `communicate`: that would close stdin, and a balloon ends with it.
                told, complaint = await asyncio.gather(process.stdout.read(), process.stderr.read())
                await process.wait()
        except TimeoutError as error:
            raise Unavailable("balloon_failed", "the balloon did not end when its time was over") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = complaint.decode(errors="replace").strip()[-200:]
            raise Unavailable("balloon_failed", f"the balloon ended with {process.returncode}: {last}")
        self.most_mib = max(self.most_mib, int(told))
