"""Runs the fault table: each row twice on its own cluster, with every check and with the row's checks off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field

from cluster.selftest.kills import kill_trial
from cluster.selftest.lab import PROMPT_TOKENS, Answer, Lab, Reply, Subject
from cluster.selftest.rows import ROWS, Observed, Row
from kvstore.checks import ALL_CHECKS, Checks

TRIAL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RowResult:
    """One printed row. `control_wrong`: without the row's checks the fault reaches the answer. `failures`:
    requests that decode counted as failed while the row ran with every check, by cause; not known where a row kills."""

    number: str
    name: str
    model: str
    error: str  # STATUS/reason
    tokens_sent: int
    fail_closed: bool
    neighbour_ok: bool
    pages_back: bool
    checks_off: tuple[str, ...]
    control_wrong: bool
    detail: str = ""
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.fail_closed and self.neighbour_ok and self.pages_back and self.control_wrong


@dataclass(frozen=True)
class Trial:
    seen: Observed
    neighbour_ok: bool
    pages_back: bool
    failures: dict[str, int] = field(default_factory=dict)


async def run_trial(row: Row, subject: Subject, checks: Checks) -> Trial:
    """One cluster, one fault, one healthy neighbour on the same workers."""
    if row.run is None:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            return Trial(*await kill_trial(row, subject, checks))
    lab = Lab(subject, checks, row.prompt_tokens, flags=row.flags, prefill_flags=row.prefill_flags)
    async with asyncio.timeout(TRIAL_TIMEOUT_S):
        try:
            await lab.start()
            prompt = subject.prompt("neighbour")
            running = asyncio.Event()
            neighbour = asyncio.create_task(lab.ask(prompt, subject.neighbour_tokens, lambda count: running.set()))
            await running.wait()
            seen = await row.run(lab)
            reply = await neighbour
            right, back = subject.right(prompt, reply), await lab.settled()
            failures = {cause: n for cause, n in lab.decode.engine.facts().outcomes.items() if cause != "ok"}
            return Trial(seen, right, back, failures)
        finally:
            await lab.stop()


async def run_row(row: Row, subject: Subject) -> RowResult:
    """Both trials of a row. Never raises: what goes wrong is the row's detail."""
    try:
        real = await run_trial(row, subject, ALL_CHECKS)
        control = await run_trial(row, subject, ALL_CHECKS.without(*row.off))
    except Exception as error:
        return RowResult(row.number, row.name, subject.name, "", 0, False, False, False, row.off, False, repr(error))
    reply = real.seen.reply
    closed = is_fail_closed(subject, row, reply, real.seen)
    return RowResult(
        number=row.number,
        name=row.name,
        model=subject.name,
        error=f"{reply.error.status}/{reply.error.reason}" if reply.error else "none",
        tokens_sent=len(reply.tokens),
        fail_closed=closed,
        neighbour_ok=real.neighbour_ok and real.seen.others_ok,
        pages_back=real.pages_back,
        checks_off=row.off,
        control_wrong=(wrong := is_wrong(subject, row, control.seen)),
        detail="" if wrong else f"control ended with {control.seen.reply.error!r}",
        failures=real.failures,
    )


def _expected(subject: Subject, row: Row) -> Answer:
    """The oracle's answer to the request that the row reports."""
    tokens = row.prompt_tokens if row.reported == "victim" else PROMPT_TOKENS
    return subject.answer(subject.prompt(row.reported, tokens), subject.answer_tokens)


def is_fail_closed(subject: Subject, row: Row, reply: Reply, seen: Observed) -> bool:
    """A typed error, and every token before it is the oracle's; or, of a bystander, the whole right answer."""
    expected = _expected(subject, row)
    right = expected.begins_with(reply)
    if not row.must_fail:
        return right and reply.error is None and reply.tokens == expected.tokens
    return right and reply.error is not None and not seen.damage


def is_wrong(subject: Subject, row: Row, seen: Observed) -> bool:
    """Whether a control let the fault through."""
    expected, reply = _expected(subject, row), seen.reply
    short = reply.error is None and reply.tokens != expected.tokens
    return seen.damage or short or expected.differs(reply)


async def run_table(
    subjects: Sequence[Subject], rows: Sequence[Row] = ROWS, on_start: Callable[[Row, Subject], None] | None = None
) -> AsyncIterator[RowResult]:
    """Results as they come."""
    for subject in subjects:
        for row in rows:
            if on_start is not None:
                on_start(row, subject)
            yield await run_row(row, subject)


def as_json(results: Sequence[RowResult]) -> dict[str, object]:
    """What `genlock selftest -o json` prints."""
    return {"ok": all(r.ok for r in results), "rows": [asdict(r) for r in results]}
