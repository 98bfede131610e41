"""A slice of the fuzzers, of a hundred thousand cases: whatever comes in, it is refused with a typed error or it is
right; a healthy request beside it is right; and everything is back at the end.

More of the same: `python -m tests.fuzz --cases 1000000`.
"""

from __future__ import annotations

import pytest

from kvstore.checks import ALL_CHECKS
from kvstore.errors import GenlockError, InvalidInput
from tests.fuzz import run
from tests.fuzz.layer import Finding, Layer, typed
from tests.fuzz.pages import Events, Pulls

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


def test_the_slice_has_its_size():
    parts = [layer.share for layer in run.PURE] + [part for part, _ in run.LIVE.values()]
    assert sum(parts) >= CASES


# --- fuzzers that cannot find anything are no tests -----------------------------------------------------------------


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
