"""The reconciler: what is wanted and what was heard in, new rows and actions out. Pure: no clock, no network.

    heard ─► rows ─► counts (who leaves, who is new) ─► deadlines ─► actions

Each action is asked for once in a life of a worker: `Row.step` only grows. Every wait has a deadline in its row, so
every drain ends, answered or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cluster.control.state import (
    Action,
    Drain,
    DrainAsked,
    Ended,
    Found,
    Kill,
    Observation,
    Phase,
    Policy,
    Record,
    Row,
    Silent,
    Start,
    Started,
    StartFailed,
    State,
    Step,
    Stop,
    Told,
)
from cluster.registry.records import Event
from cluster.roles import Role

# Decode first: its running requests may still need prefill.
ROLES = (Role.DECODE, Role.PREFILL)
NO_PREFILL = "ready, but no prefill worker is known: it has not exchanged a page with anybody"


def reconcile(state: State, now_ms: int, observations: Iterable[Observation] = ()) -> tuple[State, tuple[Action, ...]]:
    """One turn. The same state, time and observations give the same result; nothing is remembered elsewhere."""
    turn = _Turn(state, now_ms)
    for seen in observations:
        turn.hear(seen)
    turn.carry_out_asked()
    for role in ROLES:
        turn.fit_count(role)
    for worker_id in sorted(turn.rows):
        turn.advance(turn.rows[worker_id])
    return replace(state, rows=MappingProxyType(dict(turn.rows)), lives=turn.lives), tuple(turn.actions)


def leavers(rows: Iterable[Row], count: int) -> list[str]:
    """Which `count` workers of one role go: those that serve nobody first, then the least loaded, then the youngest
    name."""
    rank = {Phase.STOPPED: 0, Phase.DRAINING: 1, Phase.STARTING: 2, Phase.DEGRADED: 3, Phase.READY: 4}
    order = sorted(
        rows,
        key=lambda row: (
            min(rank[row.phase], 1) if row.asked else rank[row.phase],
            row.load,
            -index_of(row.worker_id),
            row.worker_id,
        ),
    )
    return [row.worker_id for row in order[: max(0, count)]]


def backoff_ms(policy: Policy, failures: int) -> int:
    """The wait before the next start after `failures` bad ends in a row."""
    if failures <= 0:
        return 0
    return int(min(policy.backoff_ms * 2 ** min(failures - 1, 30), policy.backoff_cap_ms))


def index_of(worker_id: str) -> int:
    """The number at the end of a name; 0 where there is none."""
    tail = worker_id.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 10 else 0


def unsettled(state: State) -> str:
    """Why the fleet is not what is wanted; empty: it is."""
    reasons = []
    for role in (Role.PREFILL, Role.DECODE):
        rows, wanted = state.of(role), state.wanted(role)
        ready = sum(row.phase is Phase.READY and not row.leaving for row in rows)
        if ready < wanted:
            reasons.append(f"{ready} of {wanted} {role.value} workers are ready")
        elif ready > wanted:  # before the turn that chooses who goes
            reasons.append(f"{ready} {role.value} workers are ready, {wanted} wanted")
    odd = (row for row in state.rows.values() if row.phase is not Phase.READY or row.leaving)
    reasons += [
        f"{row.worker_id} is {row.phase.value}" + (f": {row.reason}" if row.reason else "")
        for row in sorted(odd, key=lambda row: row.worker_id)
    ]
    return "; ".join(reasons)


def _is_to_go(row: Row) -> bool:
    return row.leaving or bool(row.asked)


def _is_there(row: Row) -> bool:
    """It has answered, and nobody has asked it to go: an exchange with it is asked for."""
    return row.phase in (Phase.STARTING, Phase.READY) and row.step is Step.NONE and row.incarnation != 0


def _why(row: Row) -> str:
    return row.asked or "fewer workers are wanted"


class _Turn:
    """The working copy of one turn."""

    def __init__(self, state: State, now_ms: int) -> None:
        self.state = state
        self.policy = state.policy
        self.now_ms = now_ms
        self.lives = state.lives
        self.closed = state.desired.avoided
        self.rows: dict[str, Row] = dict(state.rows)
        self.actions: list[Action] = []

    # --- hearing --------------------------------------------------------------------------------------------------

    def hear(self, seen: Observation) -> None:
        if isinstance(seen, Found):
            self._found(seen)
            return
        row = self.rows.get(seen.worker_id)
        if row is None:
            return
        if isinstance(seen, DrainAsked):
            self._drain_asked(row, seen)
            return
        if seen.life != row.life or not row.alive:
            return  # news of an earlier life
        if isinstance(seen, Started):
            self._started(row, seen)
        elif isinstance(seen, StartFailed):
            self._bad_end(row, seen.reason)
        elif isinstance(seen, Told):
            self._told(row, seen)
        elif isinstance(seen, Silent):
            self._silent(row, seen)
        else:
            self._ended(row, seen)

    def _found(self, seen: Found) -> None:
        row = self.rows.get(seen.worker_id)
        if row is not None and row.alive:
            return
        life = self._next_life()
        fresh = Row(
            seen.worker_id, seen.role, Phase.STOPPED, "", self.now_ms, life=life, endpoint=seen.endpoint,
            incarnation=seen.incarnation, node=seen.node, node_id=seen.node_id,
            restarts=0 if row is None else row.restarts,
        )  # fmt: skip
        if seen.draining:
            self._begin_drain(fresh, "was draining when it was found")
        else:
            self._to(fresh, Phase.STARTING, "found alive", deadline_ms=self.now_ms + self.policy.start_ms)

    def _started(self, row: Row, seen: Started) -> None:
        row = replace(row, endpoint=seen.endpoint, node=seen.node, node_id=seen.node_id)
        # Its node was closed while it came up there.
        late = row.step is Step.NONE and row.node_id in self.closed
        how = "drained" if row.node_id in self.state.desired.closed.values() else "cordoned"
        self.rows[row.worker_id] = replace(row, asked=row.asked or f"node {row.node} is {how}") if late else row

    def _told(self, row: Row, seen: Told) -> None:
        if row.incarnation and seen.incarnation != row.incarnation:
            return  # another life that answers at the same place
        if row.told_ms > seen.asked_ms:
            return  # overtaken by a later answer
        load = seen.running + seen.waiting
        row = self.rows[row.worker_id] = replace(
            row, incarnation=seen.incarnation, load=load, idle=not (load + seen.leases), told_ms=seen.asked_ms,
            owed=seen.owed, late_answers=0, proves=seen.proves, tried=seen.tried,
        )  # fmt: skip
        fault = seen.fault
        if not fault and seen.step_age_ms > self.policy.stall_ms:
            fault = f"its step loop has stood still for {seen.step_age_ms} ms"
        if row.phase not in (Phase.STARTING, Phase.READY, Phase.DEGRADED) or row.step is not Step.NONE:
            return
        if seen.draining and not fault:
            self._begin_drain(row, "it drains by itself")
        elif fault and row.phase is Phase.STARTING:
            self.rows[row.worker_id] = replace(row, reason=fault[:256])  # its start's deadline decides
        elif fault:
            self._to(row, Phase.DEGRADED, fault)
        elif row.phase is Phase.STARTING and (untried := self._waits_for(row)):
            self.rows[row.worker_id] = replace(row, reason=f"has not exchanged a page with {untried} yet")
        elif row.phase is not Phase.READY:
            self._to(row, Phase.READY, self._ready_but(row), ready_ms=self.now_ms, deadline_ms=0)
        elif row.reason != (reason := self._ready_but(row)):
            self.rows[row.worker_id] = replace(row, reason=reason)

    def _waits_for(self, row: Row) -> str:
        """Whom a starting worker still has to exchange a page with; "" for nobody. All that are ready, for half of its
        start's time; then one of them is enough, or one that cannot be reached would keep every new worker out."""
        untried = self._untried(row)
        patient = self.now_ms < row.deadline_ms - self.policy.start_ms // 2
        if untried and (patient or not self._tried_one(row)):
            return untried
        return self._unproved(row)

    def _tried_one(self, row: Row) -> bool:
        """An exchange of a starting worker with a ready one of the other role has been tried."""
        if row.role is Role.DECODE:
            return bool(row.tried)
        ready = [other for other in self._of(Role.DECODE) if other.phase is Phase.READY and other.step is Step.NONE]
        return any(not other.proves or other.tried.get(row.worker_id) == row.incarnation for other in ready)

    def _untried(self, row: Row) -> str:
        """A ready worker of the other role that this one could not serve with yet; "" where there is none."""
        for other in self._of(Role.PREFILL if row.role is Role.DECODE else Role.DECODE):
            decode, prefill = (row, other) if row.role is Role.DECODE else (other, row)
            new = decode.proves and decode.tried.get(prefill.worker_id) != prefill.incarnation
            if new and other.phase is Phase.READY and other.step is Step.NONE:
                return other.worker_id
        return ""

    def _unproved(self, row: Row) -> str:
        """A prefill worker that is known, where this decode worker has passed an exchange with none; "" where it has,
        or where nobody is known. One that fails with all has a fault: where some were tried, one of them passed."""
        if not row.proves or row.tried:
            return ""
        known = (other.worker_id for other in self._of(Role.PREFILL) if _is_there(other))
        return min(known, default="")

    def _ready_but(self, row: Row) -> str:
        """What a ready worker's reason says of it. A decode worker that was ready stays so while prefill workers begin
        new lives: each is tried at once."""
        if not row.proves:
            return ""
        missing = self._untried(row) or self._unproved(row)
        if not missing and not row.tried:
            return NO_PREFILL
        return f"has not exchanged a page with {missing} yet" if missing else ""

    def _silent(self, row: Row, seen: Silent) -> None:
        row = self.rows[row.worker_id] = replace(row, late_answers=row.late_answers + 1)
        if row.phase not in (Phase.READY, Phase.DEGRADED) or row.step is not Step.NONE:
            return
        if seen.refused or row.late_answers >= self.policy.late_answers:
            self._to(row, Phase.DEGRADED, f"does not answer: {seen.detail}")

    def _ended(self, row: Row, seen: Ended) -> None:
        if row.phase is Phase.DRAINING:
            self._gone(row, row.reason)
        else:
            self._bad_end(row, seen.detail or row.reason)

    def _drain_asked(self, row: Row, seen: DrainAsked) -> None:
        row = self.rows[row.worker_id] = replace(
            row, leaving=row.leaving or seen.leaving, drain_ms=seen.drain_ms or row.drain_ms
        )
        if not row.alive:
            # Nothing to drain: it goes, or its next start comes at once.
            self.rows[row.worker_id] = replace(row, not_before_ms=self.now_ms)
        elif row.step is Step.NONE:
            self.rows[row.worker_id] = replace(row, asked=seen.reason or "asked for")

    # --- counts ---------------------------------------------------------------------------------------------------

    def carry_out_asked(self) -> None:
        """Restarts that are kept in the registry: the life with that incarnation is to end. A controller that was
        restarted meanwhile finds them there."""
        for worker_id, incarnation in self.state.desired.restarts.items():
            row = self.rows.get(worker_id)
            if row is not None and row.alive and row.step is Step.NONE and incarnation == row.incarnation != 0:
                self.rows[worker_id] = replace(row, asked=row.asked or "restart asked for")

    def fit_count(self, role: Role) -> None:
        wanted = self.state.wanted(role)
        staying = [row for row in self.rows.values() if row.role is role and not row.leaving]
        for worker_id in leavers(staying, len(staying) - wanted):
            self.rows[worker_id] = replace(self.rows[worker_id], leaving=True)
            self._record(worker_id, "scale", "is to go: fewer workers are wanted")
        missing = wanted - len(staying)
        for row in self._of(role):
            if missing > 0 and row.leaving and row.step is Step.NONE:  # chosen to go, not asked yet: it stays
                self.rows[row.worker_id] = replace(row, leaving=False)
                missing -= 1
        for _ in range(missing):
            worker_id = self._free_name(role)
            self.rows[worker_id] = Row(
                worker_id, role, Phase.STOPPED, "not started yet", self.now_ms, not_before_ms=self.now_ms
            )

    def _next_life(self) -> int:
        self.lives += 1
        return self.lives

    def _free_name(self, role: Role) -> str:
        index = 0
        while f"{role.value}-{index}" in self.rows:
            index += 1
        return f"{role.value}-{index}"

    # --- deadlines ------------------------------------------------------------------------------------------------

    def advance(self, row: Row) -> None:
        steps: Mapping[Phase, Callable[[Row], None]] = {
            Phase.STOPPED: self._advance_stopped,
            Phase.STARTING: self._advance_starting,
            Phase.READY: self._advance_ready,
            Phase.DEGRADED: self._advance_degraded,
            Phase.DRAINING: self._advance_draining,
        }
        steps[row.phase](row)
        now = self.rows.get(row.worker_id)
        if now is not None and now.step is Step.KILL and self.now_ms >= now.deadline_ms and now.alive:
            self._gone(now, f"{now.reason} (its end was not confirmed)")

    def _advance_stopped(self, row: Row) -> None:
        if row.leaving:
            self._forget(row)
            return
        alive = sum(other.alive for other in self._of(row.role))
        room = alive < self.state.wanted(row.role) + self.policy.surge
        crashed = row.life > 0 and row.failures > 0
        if self.now_ms < row.not_before_ms or not room or (crashed and not self.policy.restart):
            return
        life = self._next_life()
        self._to(
            replace(row, life=life, incarnation=0, endpoint="", node="", node_id="", step=Step.NONE, ready_ms=0,
                    idle=False, told_ms=0, asked="", proves=False, tried=MappingProxyType({}),
                    drain_ms=0, load=0, late_answers=0, owed=MappingProxyType({}),
                    restarts=row.restarts + (row.life > 0)),
            Phase.STARTING, "", deadline_ms=self.now_ms + self.policy.start_ms,
        )  # fmt: skip
        self.actions.append(Start(row.worker_id, row.role, life, self.closed))

    def _advance_starting(self, row: Row) -> None:
        if row.step is Step.NONE and _is_to_go(row) and (not row.endpoint or self._may_drain(row)):
            self._begin_end(row, _why(row))
        elif row.step is Step.NONE and self.now_ms >= row.deadline_ms:
            self._kill(row, f"not ready within {self.policy.start_ms} ms" + (f": {row.reason}" if row.reason else ""))
        elif row.step is Step.STOP and self.now_ms >= row.deadline_ms:
            self._kill(row, row.reason)

    def _advance_ready(self, row: Row) -> None:
        if _is_to_go(row) and self._may_drain(row):
            self._begin_drain(row, _why(row))
        elif row.failures and self.now_ms - row.ready_ms >= self.policy.healthy_ms:
            self.rows[row.worker_id] = replace(row, failures=0)

    def _advance_degraded(self, row: Row) -> None:
        if row.step is not Step.NONE:
            return
        if _is_to_go(row) and self._may_drain(row):
            self._begin_drain(row, _why(row))
        elif self.now_ms - row.since_ms >= self.policy.kill_ms:
            self._kill(row, row.reason)

    def _advance_draining(self, row: Row) -> None:
        if row.step is Step.DRAIN:
            if self._drained(row):
                self._stop(row, row.reason)
            elif self.now_ms >= row.deadline_ms:
                self._record(row.worker_id, "drain", "the drain's deadline has passed: what still runs ends")
                self._stop(row, row.reason)
        elif row.step is Step.STOP and self.now_ms >= row.deadline_ms:
            self._kill(row, row.reason)

    def _may_drain(self, row: Row) -> bool:
        """Decode before prefill: what decode still has to fetch comes from prefill. And never before somebody who stays
        has been ready for as long as a door stays open: routers have to have heard of it."""
        if row.role is Role.PREFILL and any(other.leaving and other.alive for other in self._of(Role.DECODE)):
            return False
        staying = [
            other.ready_ms for other in self._of(row.role)
            if other.phase is Phase.READY and not _is_to_go(other) and other.worker_id != row.worker_id
        ]  # fmt: skip
        return not staying or self.now_ms - min(staying) >= self.policy.open_ms

    def _drained(self, row: Row) -> bool:
        """Nothing runs, and nobody can still come: asked after the drain's opening had ended."""
        if not row.idle or row.told_ms < row.open_until_ms:
            return False
        if row.role is Role.DECODE:
            return True
        decoders = [other for other in self._of(Role.DECODE) if other.alive]
        answering = (other for other in decoders if other.phase in (Phase.READY, Phase.DRAINING))
        owed = any(other.owed.get(row.worker_id, 0) for other in decoders)
        return not owed and all(other.told_ms >= row.open_until_ms for other in answering)

    # --- transitions ----------------------------------------------------------------------------------------------

    def _begin_end(self, row: Row, reason: str) -> None:
        """A worker that listens drains: one that was found alive may serve already. Others are stopped at once."""
        if row.phase is Phase.STARTING and not row.endpoint:
            self._stop(row, reason)
        else:
            self._begin_drain(row, reason)

    def _begin_drain(self, row: Row, reason: str) -> None:
        limit_ms = row.drain_ms or self.policy.drain_ms
        deadline_ms = self.now_ms + limit_ms
        self._to(
            row, Phase.DRAINING, reason, step=Step.DRAIN, deadline_ms=deadline_ms, idle=False,
            open_until_ms=self.now_ms + min(self.policy.open_ms, limit_ms),
        )  # fmt: skip
        self.actions.append(Drain(row.worker_id, row.life, deadline_ms))

    def _stop(self, row: Row, reason: str) -> None:
        self._to(row, row.phase, reason, step=Step.STOP, deadline_ms=self.now_ms + self.policy.stop_ms)
        self.actions.append(Stop(row.worker_id, row.life))

    def _kill(self, row: Row, reason: str) -> None:
        self._to(row, row.phase, reason, step=Step.KILL, deadline_ms=self.now_ms + self.policy.stop_ms)
        self._record(row.worker_id, "kill", reason)
        self.actions.append(Kill(row.worker_id, row.life))

    def _gone(self, row: Row, reason: str) -> None:
        """The end of a life. Asked for: the next one may begin at once. Else after the back-off."""
        asked = row.phase is Phase.DRAINING or row.step is Step.STOP
        if row.leaving:
            self._forget(row)
        elif asked:
            self._to(row, Phase.STOPPED, reason, not_before_ms=self.now_ms, failures=0, step=Step.NONE, deadline_ms=0)
        else:
            self._fail(row, reason)

    def _bad_end(self, row: Row, reason: str) -> None:
        if row.leaving or row.step is Step.STOP:
            self._gone(row, reason)
        else:
            self._fail(row, reason)

    def _fail(self, row: Row, reason: str) -> None:
        recovered = row.ready_ms and self.now_ms - row.ready_ms >= self.policy.healthy_ms
        failures = 1 if recovered else row.failures + 1
        wait_ms = backoff_ms(self.policy, failures)
        self._to(
            row, Phase.STOPPED, reason, failures=failures, not_before_ms=self.now_ms + wait_ms, step=Step.NONE,
            deadline_ms=0,
        )  # fmt: skip

    def _forget(self, row: Row) -> None:
        del self.rows[row.worker_id]
        self._record(row.worker_id, "phase", "is gone: it is not wanted any more")

    def _to(self, row: Row, phase: Phase, reason: str, **changes: Any) -> None:
        """The only place where a phase changes."""
        changed = phase is not row.phase
        since_ms = self.now_ms if changed else row.since_ms
        self.rows[row.worker_id] = replace(row, phase=phase, reason=reason[:256], since_ms=since_ms, **changes)
        if changed:
            self._record(row.worker_id, "phase", phase.value + (f": {reason[:256]}" if reason else ""))

    def _record(self, worker_id: str, kind: str, message: str) -> None:
        event = Event(self.now_ms, kind, worker_id, "controller", message[:512], revision=self.state.desired.revision)
        self.actions.append(Record(event))

    def _of(self, role: Role) -> list[Row]:
        return [row for row in self.rows.values() if row.role is role]
