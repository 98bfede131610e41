"""Negative controls: what must go wrong when a check is off. A check that nobody misses is useless or unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.checks import check_names
from sim.laws import LAWS, Violation
from sim.runner import swarm

CONTROL_SEEDS = 2000
ANY_LAW = tuple(LAWS)
AT_THE_CALLER = ("wrong_token",)


@dataclass(frozen=True)
class Control:
    """Checks that are off together, the laws that count, and why."""

    checks: tuple[str, ...]
    laws: tuple[str, ...]
    why: str = ""

    @property
    def name(self) -> str:
        return "+".join(self.checks)


# Each check alone, judged by every law: it must be missed at its own stage.
ALONE = tuple(Control((name,), ANY_LAW) for name in check_names())

# Judged by wrong tokens alone: the sets that must be off for the caller to be told something wrong.
TOGETHER = (
    Control(("handoff_id",), AT_THE_CALLER, "another handoff's completion carries another prompt's first token"),
    Control(("exact_set",), AT_THE_CALLER, "a page that was never promised is missing from the answer's KV"),
    Control(("stream_end",), AT_THE_CALLER, "an end taken for a completion has no first token"),
    Control(("layout",), AT_THE_CALLER, "bytes of one size mean something else in another layout"),
    Control(("prefix_key",), AT_THE_CALLER, "only the key tells another prompt's page at the same place"),
    Control(("digest",), AT_THE_CALLER, "only the digest sees short, torn and flipped bytes behind a right header"),
    Control(("rows",), AT_THE_CALLER, "only the row seals see a permuted batch of live pages"),
    Control(("quarantine",), AT_THE_CALLER, "late bytes land in the next owner's page, under its live tag"),
    Control(("tag_bump",), AT_THE_CALLER, "every tag check compares equal for ever"),
    Control(
        ("kernel", "exit"), AT_THE_CALLER, "each sees what the other sees, the exit check everything the entry does"
    ),
)

# Checks whose absence alone never reached a caller: each is caught at its own stage (ALONE) and then by these.
HIDDEN_BY: dict[str, str] = {
    "bounds": "the engine's own range check; behind it the header, the digest and the source's tag",
    "incarnation": "the header's tag and the source's live tag carry the incarnation too",
    "header": "the digest covers the header, and the prefix key the place",
    "source_tag": "header and digest, which prove the bytes; the tag proves that they were still promised",
    "entry": "the kernel compares the same tags later, and the exit check again",
    "kernel": "the exit check: a tag that differed in the kernel differs for ever",
    "exit": "the kernel: what moved on later was still right when it was read",
    "write": "one thread steps and admits, so a page freed in mid-step has no next owner before the step ends",
    "pins": "tags: a promised page that is given away is refused, so that the price is a failed request",
}


@dataclass(frozen=True)
class ControlResult:
    control: Control
    seeds: int | None  # until the first violation; None if there was none
    violation: Violation | None


def run_controls(
    controls: tuple[Control, ...] = ALONE + TOGETHER,
    *,
    seeds: range = range(CONTROL_SEEDS),
    jobs: int = 1,
    on_result: Callable[[ControlResult], None] = lambda result: None,
) -> list[ControlResult]:
    """Runs each control until its first violation."""
    results = []
    for control in controls:
        report = swarm(seeds, jobs=jobs, without=control.checks, laws=control.laws, stop_at_first=True)
        first = report.first_failing_seed
        violation = next((v for seed, v in report.failures if seed == first), None)
        result = ControlResult(control, None if first is None else first - seeds.start + 1, violation)
        on_result(result)
        results.append(result)
    return results


def line(result: ControlResult) -> str:
    """One line of the table."""
    judged = "any law" if result.control.laws == ANY_LAW else "caller"
    seeds = "NEVER" if result.seeds is None else str(result.seeds)
    law = result.violation.law if result.violation else ""
    return f"{result.control.name:28} {judged:8} {seeds:>6}  {law:24} {result.control.why}"
