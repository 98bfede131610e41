"""A process that compiles schemas which nobody has looked at yet, so that one without end ends this process alone.

A line on stdin is a schema as a JSON text; a line on stdout says why it cannot be followed: `[reason, message]`, or
null where it can. A schema that takes more than its share of processor time or memory is answered by this process's
death: by SIGPROF, or by SIGABRT where the library gets no memory. It ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from kvstore.errors import InvalidInput
from model.grammar import Grammars, too_complex

CPU_S = 1.0
MEMORY_BYTES = 2 << 30


class _Bytes:
    """Each byte a token: enough to learn whether a schema can be compiled."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


def problem(schema: str) -> list[str] | None:
    """As far as compiling it and its first steps tell: most alternatives meet where an object's names begin."""
    try:
        matcher = Grammars(_Bytes(), 257, (256,)).start(schema)
        begun: list[int] = []
        for byte in b'{"':
            if matcher.allowed(begun, len(begun))[byte]:
                begun.append(byte)
        matcher.allowed(begun, len(begun))
    except InvalidInput as error:
        return [error.reason, error.message]
    except MemoryError:
        refusal = too_complex("it needs more memory than a check may have")
        return [refusal.reason, refusal.message]
    return None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # The signal's own effect is the end of the process, also in the middle of the library.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        told = problem(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
