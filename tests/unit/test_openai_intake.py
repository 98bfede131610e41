"""What a connection may send for one request."""

from __future__ import annotations

import h11
import pytest

from cluster.openai.connection import MAX_AHEAD_BYTES, CountedParser
from cluster.openai.intake import (
    FREE_CHUNKS,
    FREE_FRAMING_BYTES,
    LEAST_MEAN_BYTES,
    MAX_HEADER_LINES,
    Intake,
    begun,
    check_head,
)
from kvstore.errors import InvalidInput

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def fed(intake: Intake, size: int, times: int) -> Intake:
    for _ in range(times):
        intake = intake.with_part(size, begins_chunk=True)
    return intake


def test_a_few_crumbs_are_taken_and_no_more():
    intake = fed(Intake(), 1, FREE_CHUNKS)
    with pytest.raises(InvalidInput, match="body") as caught:
        fed(intake, 1, 3)
    assert (caught.value.reason, caught.value.field) == ("body_in_crumbs", "body")


def test_chunks_of_a_fair_size_are_taken_without_end():
    assert fed(Intake(), LEAST_MEAN_BYTES, 50_000).chunks == 50_000


def test_a_body_of_a_told_length_has_no_chunks():
    intake = Intake()
    for _ in range(10 * FREE_CHUNKS):
        intake = intake.with_part(1, begins_chunk=False)
    assert intake.chunks == 0


def test_framing_may_not_outweigh_the_body():
    Intake(raw_bytes=FREE_FRAMING_BYTES).check_framing()
    Intake(raw_bytes=5_000_000, body_bytes=4_000_000).check_framing()
    with pytest.raises(InvalidInput) as caught:
        Intake(raw_bytes=FREE_FRAMING_BYTES + 1).check_framing()
    assert caught.value.reason == "body_in_crumbs"


@pytest.mark.parametrize(
    ("headers", "short"),
    [
        ([(b"content-length", b"10")], True),
        ([(b"content-length", b"11")], False),
        ([(b"transfer-encoding", b"chunked")], False),
        ([], False),
    ],
)
def test_a_body_is_short_when_its_length_is_told(headers, short: bool):
    assert begun(headers, 10).short is short


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_a_head_of_many_lines(end: bytes):
    line = b"a: b" + end
    check_head(line * MAX_HEADER_LINES + end + b"\n" * 10_000)
    with pytest.raises(InvalidInput, match="headers"):
        check_head(line * (MAX_HEADER_LINES + 1))


def taken(parser: CountedParser, data: bytes) -> int:
    """How many events the parser makes of `data`."""
    parser.receive_data(data)
    count = 0
    while parser.next_event() not in (h11.NEED_DATA, h11.PAUSED):
        count += 1
    return count


def taken_in_slices(parser: CountedParser, data: bytes) -> None:
    for at in range(0, len(data), 4096):
        taken(parser, data[at : at + 4096])


@pytest.mark.parametrize(
    "body",
    [
        b"1\r\n \r\n" * 5000,
        # A chunk's extension is thrown away, however long it is.
        b"".join(b"200;" + b"x" * 2000 + b"\r\n" + b" " * 512 + b"\r\n" for _ in range(60)),
    ],
    ids=["crumbs", "extensions"],
)
def test_the_parser_stops_at_a_body_that_is_work_alone(body: bytes):
    parser = CountedParser(32 << 10)
    parser.receive_data(HEAD)
    parser.next_event()
    with pytest.raises(h11.RemoteProtocolError):
        taken_in_slices(parser, body)
    assert parser.refusal is not None
    assert parser.refusal.reason == "body_in_crumbs"


def test_counts_begin_anew_with_each_request():
    parser = CountedParser(32 << 10)
    for _ in range(3):
        taken(parser, HEAD + b"1\r\n \r\n" * FREE_CHUNKS + b"0\r\n\r\n")
        parser.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()


@pytest.mark.parametrize(("length", "closes"), [(MAX_AHEAD_BYTES, False), (MAX_AHEAD_BYTES + 1, True)])
def test_who_is_refused_within_a_long_body_is_told_of_the_close(length: int, closes: bool):
    parser = CountedParser(32 << 10)
    taken(parser, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\nxx" % length)
    assert parser.leaves_body is closes
    head = parser.send(h11.Response(status_code=401, headers=[(b"content-length", b"0")]))
    assert (b"connection: close" in (head or b"")) is closes
