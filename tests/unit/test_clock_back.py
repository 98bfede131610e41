"""A worker's clock jumps back in the middle of a request: no told duration is negative, and the answer comes."""

from __future__ import annotations

import pytest

from model.sampling import SamplingParams
from tests.support.core_world import DecodeSide, PrefillSide, expected_answer
from wire.convert import duration_from_proto
from wire.elapsed import elapsed_ms

BACK_MS = 60_000
PROMPT = tuple(range(1, 20))


@pytest.mark.parametrize("jump_after", ["submission", "admission", "the first chunk"])
def test_prefills_durations_are_none_that_decode_refuses(jump_after: str) -> None:
    side = PrefillSide(now=BACK_MS)
    seq = side.submit(PROMPT)
    if jump_after == "submission":
        side.now = 0
    plan, events = side.core.plan(side.now)
    side.take(events)
    assert plan is not None
    if jump_after == "admission":
        side.now = 0
    side.step()
    if jump_after == "the first chunk":
        side.now = 0
    side.run()
    done = side.done[seq.request_no]
    for told in (done.queue_ms, done.prefill_ms):
        assert duration_from_proto(told, "a duration") >= 0


def test_decodes_queue_is_none_that_a_gateway_refuses() -> None:
    side = DecodeSide(now=BACK_MS)
    number = side.submit(PROMPT)
    side.now = 0
    side.run()
    assert [duration_from_proto(start.queue_ms, "queue_ms") for start in side.starts] == [0]
    assert side.tokens[number] == expected_answer(PROMPT, SamplingParams(max_tokens=4))


def test_what_has_passed_is_never_negative() -> None:
    assert (elapsed_ms(5, 7), elapsed_ms(7, 7), elapsed_ms(7, 5)) == (2, 0, 0)
