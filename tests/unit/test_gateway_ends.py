"""What a decode worker tells of an answer is judged: tokens, end, figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.ends import Asked, EndJudge, Told
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.sessions import Token
from cluster.operators.explain import listed
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2 as worker
from kvstore.errors import GenlockError, Unavailable
from model.sampling import SamplingParams
from model.ticket import FinishReason, finish_reason
from tests.support.fake_workers import EOS, VOCAB
from wire.causes import MAX_CAUSES, Causes
from wire.convert import finish_to_proto

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def judge(prompt_tokens: int = 5, **sampling: object) -> EndJudge:
    return EndJudge(Asked(SamplingParams(**sampling), prompt_tokens, VOCAB, (EOS,)))


def end(reason: int = LENGTH, **figures: object) -> worker.DecodeFinished:
    return worker.DecodeFinished(finish_reason=reason, **figures)


def follow(one: EndJudge, token_ids: list[int], finished: worker.DecodeFinished) -> None:
    told = Told()
    for token_id in token_ids:
        told = one.tokens(told, [Token(token_id)])
    one.end(told, finished)
    assert one.tokens(Told(), [Token(token_id) for token_id in token_ids]) == told, "however they come"


def follow_at_once(one: EndJudge, token_ids: list[int], finished: worker.DecodeFinished) -> None:
    one.end(one.tokens(Told(), [Token(token_id) for token_id in token_ids]), finished)


HONEST = [
    ([1, 2, 3], end(), {"max_tokens": 3}),
    ([1, EOS], end(STOP), {"max_tokens": 3}),
    ([1, 7], end(STOP), {"max_tokens": 3, "stop_token_ids": (7,)}),
    ([EOS, 1, EOS], end(STOP), {"max_tokens": 9, "min_tokens": 3}),
    ([EOS, 1, EOS], end(LENGTH), {"max_tokens": 3, "ignore_eos": True}),
    ([1, 2, EOS], end(STOP), {"max_tokens": 3}),
    ([1], end(cached_tokens=5, queue_ms=1.5, preemptions=2), {"max_tokens": 1}),
]
LIES = [
    ("length too early", [1, 2, 3], end(), {"max_tokens": 100}),
    ("a stop that no token is", [1, 2, 3], end(STOP), {"max_tokens": 100}),
    ("nothing at all", [], end(STOP), {"max_tokens": 100, "min_tokens": 10}),
    ("length of nothing", [], end(), {"max_tokens": 1}),
    ("before min_tokens", [1, EOS], end(STOP), {"max_tokens": 100, "min_tokens": 10}),
    ("no reason", [1, 2, 3], end(pb.FINISH_REASON_UNSPECIFIED), {"max_tokens": 3}),
    ("a reason of nobody", [1, 2, 3], end(77), {"max_tokens": 3}),
    ("the other reason", [1, 2, 3], end(STOP), {"max_tokens": 3}),
    ("an eos that does not end it", [1, EOS], end(STOP), {"max_tokens": 3, "ignore_eos": True}),
    ("more than max_tokens", [1, 2, 3, 4], end(), {"max_tokens": 3}),
    ("a token after the end", [1, EOS, 2], end(), {"max_tokens": 3}),
    ("a token of no vocabulary", [1, VOCAB, 2], end(), {"max_tokens": 3}),
    ("a token below it", [1, -1, 2], end(), {"max_tokens": 3}),
    ("more cached than there was", [1], end(cached_tokens=6), {"max_tokens": 1}),
    ("fewer than none cached", [1], end(cached_tokens=-1), {"max_tokens": 1}),
    ("a time that is no number", [1], end(queue_ms=float("nan")), {"max_tokens": 1}),
    ("a time before its beginning", [1], end(transfer_ms=-1.0), {"max_tokens": 1}),
    ("negative preemptions", [1], end(preemptions=-1), {"max_tokens": 1}),
    ("negative checks", [1], end(verification=pb.Verification(read_checks=-1)), {"max_tokens": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("token_ids", "finished", "sampling"), HONEST)
def test_what_an_honest_worker_tells_passes(token_ids, finished, sampling):
    follow(judge(**sampling), token_ids, finished)


@pytest.mark.parametrize(("lie", "token_ids", "finished", "sampling"), LIES, ids=[lie[0] for lie in LIES])
def test_what_cannot_be_is_refused(lie, token_ids, finished, sampling):
    for way in (follow, follow_at_once):
        with pytest.raises(Unavailable) as caught:
            way(judge(**sampling), token_ids, finished)
        assert caught.value.reason == "stream_protocol"


@given(
    st.lists(st.sampled_from([1, 2, 7, EOS]), max_size=8), st.integers(1, 6), st.integers(0, 6),
    st.sampled_from([(), (7,)]), st.booleans(), st.sampled_from([0, 1, 2]), st.lists(st.integers(1, 4), max_size=4),
)  # fmt: skip
def test_it_is_decodes_own_rule_however_the_tokens_come(ids, most, least, stops, ignore_eos, reason, cuts):
    sampling = SamplingParams(max_tokens=most, min_tokens=least, stop_token_ids=stops, ignore_eos=ignore_eos)
    ends = [finish_reason(token, at, sampling, (EOS,)) for at, token in enumerate(ids, 1)]
    right = bool(ids) and not any(ends[:-1]) and ends[-1] is not None and finish_to_proto(ends[-1]) == reason
    one, told, left = judge(**vars(sampling)), Told(), list(ids)
    try:
        while left:
            cut = cuts.pop() if cuts else len(left)
            told, left = one.tokens(told, [Token(token) for token in left[:cut]]), left[cut:]
        one.end(told, end(reason))
    except Unavailable:
        assert not right
    else:
        assert right


def with_top(*logprobs: float, token_id: int = 1, own: float | None = -0.5) -> Token:
    return Token(
        token_id, own, [worker.SampledLogprob(token_id=at, logprob=value) for at, value in enumerate(logprobs)]
    )


@pytest.mark.parametrize(
    ("token", "right"),
    [
        (with_top(-0.1, -0.2), True),
        (Token(1), False),  # none came
        (with_top(-0.1, -0.2, own=None), False),
        (with_top(-0.1), False),
        (with_top(-0.1, -0.2, -0.3), False),
        (with_top(-0.1, float("nan")), False),
        (with_top(0.5, -0.2), False),
        (with_top(-0.1, -0.2, own=float("nan")), False),
        (Token(1, -0.5, [worker.SampledLogprob(token_id=VOCAB)] * 2), False),
    ],
)
def test_log_probabilities_are_as_many_as_were_asked_for_and_are_some(token: Token, right: bool):
    one = judge(max_tokens=1, logprobs=2)
    if right:
        assert one.tokens(Told(), [token]) == Told(1, FinishReason.LENGTH)
    else:
        with pytest.raises(Unavailable, match="cannot be"):
            one.tokens(Told(), [token])
    assert judge(max_tokens=1).tokens(Told(), [token]).number == 1, "who did not ask is shown none"


def test_reasons_that_a_worker_makes_up_are_one_cause_and_hide_no_other():
    metrics = GatewayMetrics(lambda: None)  # type: ignore[arg-type, return-value] # not read here
    causes = {metrics.ended(GenlockError(f"invented_{at}"), 1.0) for at in range(3 * MAX_CAUSES)}
    assert causes == {"other"}
    shaped = {metrics.ended(GenlockError(f"bad_{at}"), 1.0) for at in range(3 * MAX_CAUSES)}
    assert len(shaped) <= MAX_CAUSES
    assert {metrics.ended(GenlockError(reason), 1.0) for reason in listed()} == listed()
    assert metrics.ended(None, 1.0) == "ok"


def test_a_worker_keeps_a_bounded_number_of_causes_that_peers_made_up():
    causes = Causes()
    for at in range(3 * MAX_CAUSES):
        causes.add("ok")
        causes.add(f"invented_{at}")
    kept = causes.read()
    assert len(kept) == MAX_CAUSES + 1
    assert (kept["ok"], sum(kept.values())) == (3 * MAX_CAUSES, 6 * MAX_CAUSES)
    assert kept["other"] == 2 * MAX_CAUSES + 1
