"""Decode's decisions over real guards, fed by real pulls: admission, growth, preemption, ends."""

from __future__ import annotations

import random

import pytest

from decode.core import DecodeLimits, PrefillWanted
from kvstore.errors import Cancelled, DeadlineExceeded, InvalidInput, NoCapacity, StalePage, Unavailable
from kvstore.guard import Published
from kvstore.lifecycle import SlotState
from model.sampling import SamplingParams
from model.ticket import FinishReason
from tests.support.core_world import EOS, DecodeSide, Token, expected_answer
from tests.support.kv_world import Moments, T


def prompt(start: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(start, start + tokens))


def require_right(side: DecodeSide, number: int, ids, max_tokens: int) -> None:
    assert number in side.finished, side.failed.get(number)
    assert side.tokens[number] == expected_answer(ids, SamplingParams(max_tokens=max_tokens))
    assert side.finished[number].completion_tokens == len(side.tokens[number])


# --- submission and admission ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "kind", "reason"),
    [
        ((), 1, InvalidInput, "empty_prompt"),
        (prompt(0, 30), 3, InvalidInput, "context_exceeded"),
        (prompt(0, 4 * T), 1, NoCapacity, "prompt_over_pool"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_page_is_taken(tokens, max_tokens, kind, reason):
    side = DecodeSide(slots=4, limits=DecodeLimits(context_tokens=32))
    with pytest.raises(kind) as caught:
        side.submit(tokens, max_tokens)
    assert caught.value.reason == reason
    assert not side.admit()
    side.require_baseline()


def test_exactly_the_context_and_exactly_the_pool_are_served():
    side = DecodeSide(slots=8, limits=DecodeLimits(context_tokens=32))
    ids = prompt(1, 25)
    number = side.submit(ids, 7)
    side.run()
    require_right(side, number, ids, 7)
    side.require_baseline()


def test_the_queue_is_bounded():
    side = DecodeSide(limits=DecodeLimits(max_waiting=2))
    for _ in range(2):
        side.submit(prompt(1, 3))
    with pytest.raises(NoCapacity) as caught:
        side.submit(prompt(1, 3))
    assert caught.value.reason == "decode_queue_full"


def test_admission_reserves_the_whole_prompt_or_nothing_and_keeps_the_order():
    side = DecodeSide(slots=4)
    side.submit(prompt(1, 2 * T))
    big, small = side.submit(prompt(20, 3 * T)), side.submit(prompt(40, 1))
    starts = side.admit()
    assert [len(s.local) for s in starts] == [2]
    assert side.guard.free_pages == 2, "the waiting hold nothing, and the small one does not overtake the big one"
    for start in starts:
        side.handoff(start)
    side.run()
    assert set(side.finished) == {1, big, small}
    side.require_baseline()


def test_a_page_of_headroom_stays_for_a_running_neighbour():
    side = DecodeSide(slots=4)
    side.submit(prompt(1, 2 * T))
    side.submit(prompt(20, 2 * T))
    assert len(side.admit()) == 1
    alone = DecodeSide(slots=2)
    alone.submit(prompt(1, 2 * T - 1), 1)
    assert len(alone.admit()) == 1, "alone it needs none"


def test_no_more_run_at_a_time_than_the_limit_says():
    side = DecodeSide(limits=DecodeLimits(max_running=2))
    for i in range(4):
        side.submit(prompt(10 * i + 1, 2))
    assert len(side.admit()) == 2
    assert side.admit() == []


def test_what_is_told_of_the_wait_is_the_wait():
    side = DecodeSide()
    side.now = 100
    side.submit(prompt(1, 3))
    side.now = 130
    assert [s.queue_ms for s in side.admit()] == [30]


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, T - 1, T, T + 1, 3 * T])
@pytest.mark.parametrize("max_tokens", [1, 2, T, 2 * T + 1])
def test_answers_are_the_hand_computed_ones(tokens, max_tokens):
    side = DecodeSide()
    ids = prompt(5, tokens)
    number = side.submit(ids, max_tokens)
    side.run()
    require_right(side, number, ids, max_tokens)
    assert side.finished[number].reason is FinishReason.LENGTH
    side.require_baseline()


def test_a_batch_of_many_is_right_row_by_row():
    side = DecodeSide(slots=32)
    prompts = [prompt(3 * i + 1, i + 1) for i in range(8)]
    numbers = [side.submit(ids, 6) for ids in prompts]
    side.run()
    for number, ids in zip(numbers, prompts, strict=True):
        require_right(side, number, ids, 6)
    side.require_baseline()


def feed(side: DecodeSide, number: int, tokens) -> None:
    """Lets the model say `tokens` from the second one on."""
    for token in tokens:
        plan, outcomes = side.core.plan(side.now)
        side.take(outcomes)
        assert plan is not None
        side.take(side.core.apply(plan, [Published(number, Token(token), None)], side.now))


@pytest.mark.parametrize(
    ("said", "sampling", "reason", "kept"),
    [
        ((5,), {"max_tokens": 1}, FinishReason.LENGTH, 1),
        ((EOS,), {"max_tokens": 9}, FinishReason.STOP, 1),
        ((EOS,), {"max_tokens": 1}, FinishReason.STOP, 1),
        ((5, EOS), {"max_tokens": 9}, FinishReason.STOP, 2),
        ((5, 6, 7), {"max_tokens": 3}, FinishReason.LENGTH, 3),
        ((EOS, EOS, 5), {"max_tokens": 3, "ignore_eos": True}, FinishReason.LENGTH, 3),
        ((5, 42), {"max_tokens": 9, "stop_token_ids": (42,)}, FinishReason.STOP, 2),
        ((42,), {"max_tokens": 9, "stop_token_ids": (42,)}, FinishReason.STOP, 1),
        ((42,), {"max_tokens": 9, "stop_token_ids": (42,), "ignore_eos": True}, FinishReason.STOP, 1),
        ((EOS, EOS, EOS), {"max_tokens": 9, "min_tokens": 3}, FinishReason.STOP, 3),
        ((42, EOS), {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (42,)}, FinishReason.STOP, 2),
    ],
)
def test_an_answer_ends_where_it_must_and_says_why(said, sampling, reason, kept):
    side = DecodeSide()
    number = side.submit(prompt(1, 3), **sampling)
    [start] = side.admit()
    side.world.pull(side.world.prompt(start.ticket.token_ids, owner=9), start.ticket.token_ids, local=start.local,
                    owner=number)  # fmt: skip
    side.take(side.core.joined(number, Token(said[0]), 0))
    feed(side, number, said[1:])
    assert side.tokens[number] == list(said)
    assert (side.finished[number].reason, side.finished[number].completion_tokens) == (reason, kept)
    assert side.core.plan(0) == (None, [])
    assert side.guard.free_pages == side.guard.slots


def test_full_pages_are_sealed_and_nobody_writes_them_again():
    side = DecodeSide()
    ids = prompt(1, T + 1)
    number = side.submit(ids, 2 * T)
    side.turn()
    request = side.core.request(number)
    while len(request.tokens) <= 2 * T:
        side.turn()
    refs = request.pages.refs
    assert [side.guard.slot_state(r.page_id) for r in refs[:2]] == [SlotState.SEALED] * 2
    keys = side.world.keyer.chain("t", request.tokens[: 2 * T], T)
    assert [side.guard.describe(r, i).prefix_key for i, r in enumerate(refs[:2])] == list(keys)
    side.run()
    side.require_baseline()


# --- preemption -----------------------------------------------------------------------------------------------------


def test_a_preempted_answer_equals_an_undisturbed_one():
    """Pages go back, the next attempt has a new id, its tokens are prompt and answer so far, and the text goes on."""
    side = DecodeSide(slots=5)
    first, second = prompt(1, T + 2), prompt(30, T + 2)
    one, two = side.submit(first, 8), side.submit(second, 8)
    side.run()
    assert two in side.preempted
    assert one not in side.preempted, "the older one is spared"
    require_right(side, one, first, 8)
    require_right(side, two, second, 8)
    assert side.finished[two].preemptions == side.preempted.count(two)
    attempts = [s.ticket for s in side.starts if s.request_no == two]
    assert len({t.ticket_id for t in attempts}) == len(attempts) > 1
    for ticket in attempts[1:]:
        assert ticket.token_ids == (*second, *side.tokens[two][: ticket.generated_tokens])
        assert ticket.prompt_tokens == len(second)
    side.require_baseline()


def test_preemption_gives_the_pages_back_at_once_and_waits_first_in_line():
    side = DecodeSide(slots=4)
    side.now = 1000
    one, two = side.submit(prompt(1, T + 3), 2 * T), side.submit(prompt(30, T - 1), 2 * T)
    side.now = 5000
    side.submit(prompt(60, 2), 1)
    while not side.preempted:
        side.turn()
    assert side.preempted == [two]
    assert next(iter(side.core._waiting)) == two
    request = side.core.request(two)
    assert request.pages.refs == ()
    assert not request.joined
    side.now += 40
    side.run()
    again = next(s for s in side.starts if s.request_no == two and s.ticket.generated_tokens)
    assert again.queue_ms <= 40, "the time before its first attempt is not counted twice"
    assert one in side.finished
    side.require_baseline()


def test_alone_in_a_pool_too_small_for_its_answer_it_fails_typed():
    side = DecodeSide(slots=2)
    number = side.submit(prompt(1, T), 2 * T)
    side.run()
    error = side.failed[number]
    assert isinstance(error, NoCapacity)
    assert error.reason == "pool_exhausted"
    answer = expected_answer(prompt(1, T), SamplingParams(max_tokens=2 * T))
    assert side.tokens[number] == answer[: len(side.tokens[number])]
    side.require_baseline()


def test_preempted_too_often_it_fails_typed():
    side = DecodeSide(slots=5, limits=DecodeLimits(max_preemptions=0))
    one, two = side.submit(prompt(1, T + 2), 8), side.submit(prompt(30, T + 2), 8)
    side.run()
    assert one in side.finished
    assert isinstance(side.failed[two], NoCapacity)
    assert side.preempted == []
    side.require_baseline()


def test_a_request_in_handoff_is_not_preempted_for_one_that_runs():
    """Its pages may be under a copy; and it has not spent any compute here."""
    side = DecodeSide(slots=4)
    one = side.submit(prompt(1, T + 3), 10)
    [start] = side.admit()
    side.handoff(start)
    side.submit(prompt(30, T - 1))
    [waiting] = side.admit()
    while side.step() is not None:
        assert one not in side.finished
    assert side.preempted == [one]
    assert side.core.request(waiting.request_no).pages.refs == waiting.local
    side.handoff(waiting)
    side.run()
    require_right(side, one, prompt(1, T + 3), 10)
    side.require_baseline()


@pytest.mark.parametrize("seed", range(10))
def test_four_requests_in_a_tiny_pool_are_all_right_or_typed(seed):
    rng = random.Random(seed)
    side = DecodeSide(slots=rng.randrange(5, 9), limits=DecodeLimits(max_preemptions=50))
    asked = {}
    for i in range(4):
        ids, most = prompt(17 * i + 1, rng.randrange(1, 2 * T)), rng.randrange(1, 2 * T)
        asked[side.submit(ids, most)] = (ids, most)
    side.run()
    for number, (ids, most) in asked.items():
        require_right(side, number, ids, most)
    side.require_baseline()


# --- who computes a preempted request again -------------------------------------------------------------------------


def preempted_side(limits: DecodeLimits | None = None) -> tuple[DecodeSide, int, int]:
    """Two that ran, of which `two` was preempted and nobody answers its question; `one` has ended."""
    side = DecodeSide(slots=5, limits=limits or DecodeLimits())
    side.assigns = False
    one, two = side.submit(prompt(1, T + 2), 8), side.submit(prompt(30, T + 2), 8)
    while one not in side.finished:
        side.turn()
    assert side.preempted == [two]
    side.turn()
    return side, one, two


def test_a_preempted_request_asks_once_and_starts_when_it_has_its_answer():
    side, _one, two = preempted_side()
    for _ in range(3):
        side.turn()
    assert side.wanted == [PrefillWanted(two, 1)]
    assert side.core.request(two).pages.refs == (), "no page is held while it is asked"
    assert side.guard.free_pages == side.guard.slots
    assert not side.core.assigned(two, 2), "an answer to another question"
    assert not side.core.assigned(99, 1)
    assert side.core.assigned(two, 1)
    assert not side.core.assigned(two, 1), "one answer"
    side.assigns = True
    side.run()
    require_right(side, two, prompt(30, T + 2), 8)
    side.require_baseline()


def test_a_request_that_was_not_preempted_takes_no_answer():
    side = DecodeSide()
    number = side.submit(prompt(1, T), 4)
    error = Unavailable("no_prefill_worker", "nobody")
    assert not side.core.assigned(number, 0)
    assert side.core.refused(number, 0, error) == []
    side.turn()
    assert not side.core.assigned(number, 0)
    assert side.core.refused(number, 0, error) == []
    side.run()
    require_right(side, number, prompt(1, T), 4)


def test_a_refusal_ends_the_request_with_the_reason_that_was_told():
    side, _one, two = preempted_side()
    assert side.core.refused(two, 7, Unavailable("late", "")) == []
    side.take(side.core.refused(two, 1, Unavailable("no_prefill_worker", "nobody is ready")))
    assert side.failed[two].reason == "no_prefill_worker"
    side.require_baseline()


def test_a_question_that_nobody_answers_ends_typed_at_its_deadline():
    side, _one, two = preempted_side()
    side.now += side.limits.assign_ms - 1
    side.turn()
    assert two not in side.failed
    side.now += 1
    side.turn()
    assert isinstance(side.failed[two], Unavailable)
    assert side.failed[two].reason == "prefill_not_assigned"
    side.require_baseline()


def test_a_question_keeps_its_place_in_the_line_for_a_while_and_then_keeps_nobody_waiting():
    side, _one, two = preempted_side()
    side.now += side.limits.hold_ms - 1
    three = side.submit(prompt(60, T), 2)
    side.turn()
    assert three not in side.tokens
    side.now += 1
    side.turn()
    assert three in side.tokens
    assert side.core.assigned(two, 1)
    side.assigns = True
    side.run()
    require_right(side, two, prompt(30, T + 2), 8)
    require_right(side, three, prompt(60, T), 2)
    side.require_baseline()


# --- ends from outside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "in handoff", "decoding", "preempted"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_an_end_from_outside_in_every_phase_gives_every_page_back(phase, how):
    side = DecodeSide(slots=5)
    neighbour_ids = prompt(1, T + 2)
    neighbour = side.submit(neighbour_ids, 8)
    side.turn()
    number = side.submit(prompt(30, T + 2), 8, deadline_ms=1000)
    if phase == "in handoff":
        side.admit()
    elif phase == "decoding":
        side.turn()
    elif phase == "preempted":
        while number not in side.preempted:
            side.turn()
    if how == "cancel":
        side.take(side.core.fail(number, Cancelled("cancelled")))
        assert side.core.fail(number, Cancelled("cancelled")) == []
        assert isinstance(side.failed[number], Cancelled)
    else:
        side.take(side.core.expire(999))
        assert number not in side.failed
        side.take(side.core.expire(1000))
        assert isinstance(side.failed[number], DeadlineExceeded)
        assert side.core.expire(2000) == []
    assert side.core.joined(number, Token(9), 0) == [], "a handoff that comes too late joins nobody"
    side.run()
    require_right(side, neighbour, neighbour_ids, 8)
    side.require_baseline()


def test_a_deadline_passes_when_nothing_else_happens():
    side = DecodeSide()
    number = side.submit(prompt(1, 3), deadline_ms=50)
    side.now = 50
    side.take(side.core.expire(side.now))
    assert isinstance(side.failed[number], DeadlineExceeded)
    assert side.admit() == []


def test_a_cancel_while_the_step_computes_publishes_nothing():
    side = DecodeSide(slots=16)
    gone, kept = side.submit(prompt(1, T), 8), side.submit(prompt(30, T), 8)
    side.turn()
    before = list(side.tokens[gone])
    side.step(Moments(before_attend=lambda: side.take(side.core.fail(gone, Cancelled("cancelled")))))
    assert side.tokens[gone] == before
    side.run()
    require_right(side, kept, prompt(30, T), 8)
    side.require_baseline()


def test_a_stale_page_ends_its_request_alone():
    side = DecodeSide(slots=16)
    bad, good = side.submit(prompt(1, T), 8), side.submit(prompt(30, T), 8)
    side.turn()
    ref = side.core.request(bad).pages.refs[0]
    side.step(Moments(before_attend=lambda: side.guard.condemn((ref,)) and None))
    assert isinstance(side.failed[bad], StalePage)
    side.run()
    require_right(side, good, prompt(30, T), 8)
    side.require_baseline()


def test_a_page_that_moved_on_is_not_given_back_by_its_former_owner():
    side = DecodeSide(slots=8)
    number = side.submit(prompt(1, T), 8)
    side.turn()
    ref = side.core.request(number).pages.refs[0]
    side.guard.condemn((ref,))
    stolen = side.guard.allocate(99, 1)
    assert stolen[0].page_id == ref.page_id
    side.take(side.core.fail(number, Cancelled("cancelled")))
    assert side.guard.is_live(stolen[0])
    assert side.guard.counters["retire_refused"] == 1
    side.guard.retire(stolen, 99)
    side.require_baseline()


def test_joining_twice_emits_once():
    side = DecodeSide()
    number = side.submit(prompt(1, 3))
    [start] = side.admit()
    side.handoff(start)
    assert side.core.joined(number, Token(9), 0) == []
    assert len(side.tokens[number]) == 1
    assert side.core.joined(12345, Token(9), 0) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_lives_end_at_the_baseline(seed):
    rng = random.Random(seed)
    side = DecodeSide(slots=7, limits=DecodeLimits(max_running=3, max_waiting=5, max_preemptions=3))
    asked: dict[int, tuple] = {}
    handoffs: list = []
    for _ in range(120):
        side.now += rng.randrange(3)
        act = rng.random()
        if act < 0.25:
            ids, most = prompt(rng.randrange(90), rng.randrange(1, 2 * T)), rng.randrange(1, 2 * T)
            try:
                asked[side.submit(ids, most, deadline_ms=side.now + rng.choice((5, 1000)))] = (ids, most)
            except NoCapacity:
                continue
        elif act < 0.35 and asked:
            side.take(side.core.fail(rng.choice(list(asked)), Cancelled("cancelled")))
        side.take(side.core.expire(side.now))
        handoffs += side.admit()
        if handoffs and rng.random() < 0.7:
            start = handoffs.pop(rng.randrange(len(handoffs)))
            if side.core.request(start.request_no) is not None:
                side.handoff(start)
        side.step()
        assert side.guard.counts().total == 7
    for start in handoffs:
        if side.core.request(start.request_no) is not None:
            side.handoff(start)
    side.run()
    for number, (ids, most) in asked.items():
        answer = expected_answer(ids, SamplingParams(max_tokens=most))
        if number in side.finished:
            assert side.tokens[number] == answer
        else:
            said = side.tokens.get(number, [])
            assert said == answer[: len(said)]
    assert side.finished
    side.require_baseline()
