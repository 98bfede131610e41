"""What a connection may send for one request, judged while it comes. Pure: counts in, counts or a refusal out.

A chunk costs the server about as much as a kilobyte does, however little is in it. So a body in crumbs is refused long
before it reaches the limit of its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import InvalidInput

MAX_HEADER_LINES = 128
# A few small chunks are how some clients write; many are work and nothing else.
FREE_CHUNKS = 256
LEAST_MEAN_BYTES = 128
# Sizes and extensions of chunks, beside a share of the body.
FREE_FRAMING_BYTES = 64 << 10
FRAMING_SHARE = 4


@dataclass(frozen=True)
class Intake:
    """One request's body so far. `short`: its head promised no more than what is read to its end in any case."""

    raw_bytes: int = 0
    body_bytes: int = 0
    chunks: int = 0
    short: bool = False

    def with_raw(self, count: int) -> Intake:
        """`count` bytes came from the wire, whatever they are."""
        return Intake(self.raw_bytes + count, self.body_bytes, self.chunks, self.short)

    def with_part(self, count: int, *, begins_chunk: bool) -> Intake:
        """`count` bytes of body were read. Raises InvalidInput (`body_in_crumbs`)."""
        more = Intake(self.raw_bytes, self.body_bytes + count, self.chunks + begins_chunk, self.short)
        if more.chunks > FREE_CHUNKS + more.body_bytes // LEAST_MEAN_BYTES:
            raise InvalidInput(
                "body_in_crumbs",
                f"the body comes in chunks of less than {LEAST_MEAN_BYTES} bytes: send it in larger ones, or with its "
                "content-length",
                field="body",
            )
        return more

    def check_framing(self) -> None:
        """Once what came is read as far as it goes. Raises InvalidInput (`body_in_crumbs`)."""
        if self.raw_bytes - self.body_bytes > FREE_FRAMING_BYTES + self.body_bytes // FRAMING_SHARE:
            raise InvalidInput("body_in_crumbs", "what frames the chunks of the body outweighs it", field="body")


def begun(headers: Iterable[tuple[bytes, bytes]], short_bytes: int) -> Intake:
    """A request's body before anything of it is read; a length that is told and at most `short_bytes` is short. Names
    of headers are in lower case, as h11 has them."""
    values = dict(headers)
    length = values.get(b"content-length")
    told = length is not None and b"transfer-encoding" not in values
    return Intake(short=told and int(length or b"0") <= short_bytes)


def check_head(data: bytes) -> None:
    """`data` begins with a head that may not be whole. Raises InvalidInput (`bad_http`) for one of too many lines."""
    ends = [end for end in (data.find(b"\r\n\r\n"), data.find(b"\n\n")) if end >= 0]
    if data.count(b"\n", 0, min(ends, default=len(data))) > MAX_HEADER_LINES:
        raise InvalidInput("bad_http", f"a request may have {MAX_HEADER_LINES} headers at most")
