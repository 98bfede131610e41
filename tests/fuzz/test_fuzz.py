"""A slice of the fuzzers, of a hundred thousand cases: whatever comes in, it is refused with a typed error or it is
right; a healthy request beside it is right; and everything is back at the end.

More of the same: `python -m tests.fuzz --cases 1000000`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlock.v1 import worker_pb2
from kvstore.checks import ALL_CHECKS
from kvstore.errors import Cancelled, GenlockError, InvalidInput
from kvstore.layout import HEADER_BYTES
from tests.fuzz import codecs, run
from tests.fuzz.layer import Finding, Layer, typed
from tests.fuzz.numbers import Numbers
from tests.fuzz.pages import Events, Pulls
from wire.errors import to_status

CASES, SEED = 100_000, 0
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("layer", run.PURE, ids=lambda layer: layer.name.replace(" ", "_"))
def test_a_border_without_a_network(layer: Layer):
    report = run.run_pure(layer, run.share(layer.share, CASES), SEED)
    assert not report.findings, report.findings[:3]
    assert len(report.outcomes) > 1, "every case came to the same"


async def test_a_live_cluster_under_hostile_calls():
    reports = await run.run_live({name: run.share(part, CASES) for name, (part, _) in run.LIVE.items()}, SEED)
    assert not run.findings(reports), run.findings(reports)[:5]
    asked = {report.layer: report for report in reports}
    assert asked["events from prefill"].outcomes["ok"] > 20, "what was not altered is served"
    assert len(asked["events from prefill"].outcomes) > 10
    assert len(asked["calls to decode"].outcomes) > 8
    assert asked["commands of a session"].outcomes["a number again"] > 10, "numbers are used again, also after an end"


STATELESS = {layer.name: made for layer in codecs.LAYERS if isinstance(made := layer.make(SEED), codecs.Pure)}


def searched(under: codecs.Pure) -> set[str]:
    """What the cases came to that hypothesis chose: it draws what a generator would, and makes small what fails."""
    seen: set[str] = set()
    search = given(st.randoms(use_true_random=False))(lambda rng: seen.add(under.run(rng)))
    settings(max_examples=300, deadline=None, database=None)(search)()
    return seen


@pytest.mark.parametrize("name", STATELESS, ids=lambda name: name.replace(" ", "_"))
def test_hypothesis_finds_nothing_at_a_border_without_state(name: str):
    assert len(searched(STATELESS[name])) > 1, "every case came to the same"


def test_the_slice_has_its_size():
    parts = [layer.share for layer in run.PURE] + [part for part, _ in run.LIVE.values()]
    assert sum(parts) >= CASES


# --- fuzzers that cannot find anything are no tests -----------------------------------------------------------------


def test_hypothesis_finds_a_header_that_is_read_without_its_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.fuzz.codecs.unpack_header", lambda raw: raw[HEADER_BYTES - 1])
    with pytest.raises(Finding, match="IndexError"):
        searched(STATELESS["page headers"])


@pytest.mark.parametrize(
    ("case", "off"), [(Pulls, "digest"), (Pulls, "prefix_key"), (Events, "exact_set")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)  # fmt: skip
def test_without_a_check_the_fuzzer_finds_what_it_is_for(case: type, off: str):
    checks = ALL_CHECKS.without("header", "prefix_key") if off == "prefix_key" else ALL_CHECKS.without(off)
    under = case(SEED, checks)
    for number in range(3000):
        try:
            under.case(number)
        except Finding:
            return
    raise AssertionError(f"3000 cases without {off} and nothing was found")


def told(*token_ids: int, ends: str = "") -> worker_pb2.DecodeEvents:
    events = worker_pb2.DecodeEvents(call_nos=[7] * len(token_ids), token_ids=token_ids)
    if ends == "finished":
        events.events.add(call_no=7).finished.completion_tokens = len(token_ids)
    elif ends:
        events.events.add(call_no=7, failed=to_status(Cancelled(ends)))
    return events


def right(ticket: worker_pb2.Ticket, tokens: Sequence[int], whole: bool) -> None:
    """An answer is the prompt."""
    wanted = list(ticket.token_ids)
    if list(tokens) != (wanted if whole else wanted[: len(tokens)]):
        raise Finding("wrong tokens")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([told(1, 2, ends="finished")], False),
        ([told(1, ends="cancelled"), told(ends="call_no_taken")], False),
        ([told(1, ends="cancelled"), told(2)], True),  # the first one's, or the second one's: nobody can tell
        ([told(1, ends="cancelled"), told(ends="finished")], True),
        ([told(8, 9, ends="finished"), told(ends="call_no_taken")], True),
        ([told(1, ends="finished")], True),
        ([told(1, 2)], True),
        ([told(1, 2, ends="finished"), told(ends="call_no_taken"), told(ends="call_no_taken")], True),
    ],
)
def test_the_fuzzer_of_sessions_finds_what_comes_under_a_number_that_is_anothers(
    events: list[worker_pb2.DecodeEvents], found: bool
):
    judge = Numbers(right)
    for prompt in ((1, 2), (8, 9)):
        submit = worker_pb2.DecodeRequest(ticket=worker_pb2.Ticket(token_ids=prompt))
        judge.sent(worker_pb2.DecodeCommand(call_no=7, submit=submit))

    def follow() -> None:
        for one in events:
            judge.take(one)
        judge.close()

    if found:
        with pytest.raises(Finding):
            follow()
    else:
        follow()


def test_only_typed_errors_pass():
    def raises(error: Exception):
        def work() -> None:
            raise error

        return work

    for surprise in (ValueError("x"), RecursionError(), GenlockError("internal", "x"), InvalidInput("bad", "no field")):
        with pytest.raises(Finding):
            typed(raises(surprise))
    assert typed(raises(InvalidInput("bad", "x", field="y"))) == "bad"
    assert typed(lambda: None) == "ok"


@pytest.mark.parametrize("layer", run.PURE, ids=lambda layer: layer.name.replace(" ", "_"))
def test_a_case_is_the_same_again(layer: Layer):
    def outcomes() -> list[str]:
        under = layer.make(3)
        try:
            return [under.case(n) for n in range(30)]
        finally:
            under.close()

    assert outcomes() == outcomes()
