"""What operators and the autoscaler may ask of the fleet: checked, kept in the registry, then answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

from cluster.control.api import Change, FleetControl, FleetView, NodeRow, ScalePlan, WorkerRow
from cluster.control.closing import closed_with, cordoned, is_closed, on_node, uncordoned, with_id
from cluster.control.controller import Controller
from cluster.control.core import ROLES, leavers, unsettled
from cluster.control.decisions import Decisions
from cluster.control.hands import Autoscaler
from cluster.control.keys import check_same, kept_of
from cluster.control.state import DrainAsked, Phase, Row, State
from cluster.registry.records import Desired, Event
from cluster.roles import MAX_WORKERS, Role
from genlock.v1 import operator_pb2
from kvstore.errors import Conflict, GenlockError, InvalidInput, NotFound, Refused
from wire.ending import end_tasks
from wire.errors import surprise
from wire.loops import keep_going

MAX_DRAIN_MS = 86_400_000
ANSWER_TTL_MS = 24 * 3600 * 1000
# How long the launcher may take to say which nodes there are.
NODES_S = 3.0
AUTOSCALER = "autoscaler"


class Moved(StrEnum):
    """What a decision of the autoscaler did to one role."""

    HELD = "held"
    UP = "up"
    DOWN = "down"


class Operations(FleetControl):
    """One change at a time. `endpoint`: where this controller can be called; may be set later."""

    def __init__(self, controller: Controller, autoscaler: Autoscaler | None = None, autoscale_ms: int = 5_000) -> None:
        self.endpoint = ""
        # Decisions of the autoscaler, carried out or held.
        self.moved: Counter[tuple[Role, Moved]] = Counter()
        self.surprises = 0
        self._controller = controller
        self._autoscaler = autoscaler
        self._autoscale_ms = autoscale_ms
        self._decisions = Decisions(controller.registry)
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to ask the autoscaler, where there is one."""
        if self._autoscaler is not None:
            autoscaler = self._autoscaler
            self._task = asyncio.create_task(
                keep_going(lambda: self._autoscale_turn(autoscaler), "the autoscaler", self._surprised),
                name="autoscale",
            )

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    # --- reading ------------------------------------------------------------------------------------------------------

    async def view(self) -> FleetView:
        return self._view()

    async def decisions(self, limit: int) -> tuple[operator_pb2.AutoscaleDecision, ...]:
        return await self._decisions.last(limit)

    async def nodes(self) -> tuple[NodeRow, ...]:
        desired = self._controller.state.desired
        return tuple(
            replace(
                row,
                drained=is_closed(desired.closed, row.node, row.node_id),
                cordoned=is_closed(desired.cordoned_nodes, row.node, row.node_id),
            )
            for row in await self._controller.hands.nodes()
        )

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        return await self._controller.registry.events(after, limit)

    async def last_events(self, limit: int = 100) -> tuple[Event, ...]:
        return await self._controller.registry.last_events(limit)

    # --- changing -----------------------------------------------------------------------------------------------------

    async def scale(
        self,
        prefill: int | None,
        decode: int | None,
        change: Change,
        *,
        current: tuple[int | None, int | None] = (None, None),
    ) -> ScalePlan:
        _check_counts(prefill, decode, change)
        async with self._lock:
            if await self._repeated(change):
                return ScalePlan(self._view(repeated=True), (), 0, 0)
            return await self._set(prefill, decode, None, change, current)

    async def apply(
        self, prefill: int | None, decode: int | None, policy: Callable[[str], str] | None, change: Change
    ) -> FleetView:
        _check_counts(prefill, decode, change)
        async with self._lock:
            if await self._repeated(change):
                return self._view(repeated=True)
            return (await self._set(prefill, decode, policy, change)).fleet

    async def cordon(self, workers: Sequence[str], nodes: Sequence[str], on: bool, change: Change) -> FleetView:
        async with self._lock:
            if await self._repeated(change):
                return self._view(repeated=True)
            ids = await self._node_ids(nodes)
            rows = self._chosen(workers, nodes, ids, placing=True)
            if not change.dry_run:
                await self._cordon(rows, workers, ids, on, change)
                await self._remember(change)
            return self._view()

    async def drain(
        self,
        workers: Sequence[str],
        nodes: Sequence[str],
        change: Change,
        *,
        deadline_ms: int = 0,
        force: bool = False,
        replace: bool = False,
    ) -> FleetView:
        if not 0 <= deadline_ms <= MAX_DRAIN_MS:
            raise InvalidInput("bad_deadline", f"deadline_ms must be 0 to {MAX_DRAIN_MS}", field="deadline_ms")
        async with self._lock:
            if await self._repeated(change):
                return self._view(repeated=True)
            ids = await self._node_ids(nodes)
            rows = self._chosen(workers, nodes, ids)
            if not force:
                self._require_others(rows)
            if not change.dry_run:
                await self._drain(rows, ids, change, deadline_ms, leaving=not replace)
                await self._remember(change)
            return self._view()

    async def restart(self, worker: str, change: Change, *, deadline_ms: int = 0, force: bool = False) -> FleetView:
        return await self.drain([worker], [], change, deadline_ms=deadline_ms, force=force, replace=True)

    async def set_autoscale(self, policy: Callable[[str], str], paused: bool | None, change: Change) -> FleetView:
        async with self._lock:
            if await self._repeated(change):
                return self._view(repeated=True)

            def wanted(before: Desired) -> Desired:
                pause = before.autoscale_paused if paused is None else paused
                return replace(before, autoscale=self._policy(policy, before), autoscale_paused=pause)

            wanted(self._controller.state.desired)  # what is wrong with it is said to a dry run too
            if not change.dry_run:
                stored = await self._controller.change(wanted, change)
                words = "policy set" if stored.autoscale else "off"
                self._controller.record(
                    "autoscale", "fleet", words if paused is None else f"{words}, {paused=}", change
                )
                await self._remember(change)
            return self._view()

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _set(
        self,
        prefill: int | None,
        decode: int | None,
        policy: Callable[[str], str] | None,
        change: Change,
        current: tuple[int | None, int | None] = (None, None),
    ) -> ScalePlan:
        """Counts and policy in one step: all of it is kept, or nothing."""
        desired = self._controller.state.desired

        def wanted(before: Desired) -> Desired:
            nonlocal desired
            desired = before  # somebody else may have changed it: the event tells what this change met
            _check_current(before, current)
            return replace(
                before,
                prefill=before.prefill if prefill is None else prefill,
                decode=before.decode if decode is None else decode,
                autoscale=before.autoscale if policy is None else self._policy(policy, before),
            )

        after = wanted(desired)
        removed, added = self._plan(after)
        if any(added.values()):
            await self._controller.check_room({Role.PREFILL: after.prefill, Role.DECODE: after.decode})
        if not change.dry_run and after != desired:
            after = await self._controller.change(wanted, change)
            if (after.prefill, after.decode) != (desired.prefill, desired.decode):
                self._controller.record(
                    "scale", "fleet",
                    f"prefill {desired.prefill} to {after.prefill}, decode {desired.decode} to {after.decode}", change,
                )  # fmt: skip
            if after.autoscale != desired.autoscale:
                self._controller.record("autoscale", "fleet", "policy set" if after.autoscale else "off", change)
        await self._remember(change)
        return ScalePlan(self._view(), removed, added[Role.PREFILL], added[Role.DECODE])

    def _policy(self, make: Callable[[str], str], before: Desired) -> str:
        """Raises Refused where nobody would follow the policy."""
        text = make(before.autoscale)
        if text and self._autoscaler is None:
            raise Refused("no_autoscaler", "this controller has no autoscaler", field="policy")
        return text

    async def _cordon(
        self, rows: Sequence[Row], workers: Sequence[str], ids: Mapping[str, str], on: bool, change: Change
    ) -> None:
        """A worker that is named is cordoned by its name; those of a node by their lives there, and the node is closed.
        Where the node has no id, nothing keeps what follows them away from it: those are cordoned by name as well."""
        chosen = frozenset(row.worker_id for row in rows)
        names = frozenset((*workers, *(row.worker_id for row in rows if not row.node_id)))
        lives = {row.worker_id: row.incarnation for row in rows if row.worker_id not in names and row.incarnation}

        def wanted(before: Desired) -> Desired:
            if on:
                return cordoned(before, names, lives, ids)
            return uncordoned(before, self._controller.state, chosen, ids)

        shut = self._controller.state.desired
        await self._controller.change(wanted, change)
        kind = "cordon" if on else "uncordon"
        for worker_id in sorted(chosen):
            self._controller.record(kind, worker_id, "by an operator", change)
        for node, node_id in sorted(ids.items()):
            if on:
                told = "takes no worker until it is uncordoned" if node_id else "is cordoned by its workers' names"
                self._controller.record(kind, "fleet", f"node {node} {told}", change)
            elif node in shut.closed or node in shut.cordoned_nodes:
                self._controller.record(kind, "fleet", f"node {node} takes workers again", change)
        here = with_id(ids).values() if on else ()
        for row in (row for row in rows if row.node_id in here and row.alive and not row.incarnation):
            # It came up there a moment ago and has served nobody: it is to serve elsewhere.
            self._controller.hear(DrainAsked(row.worker_id, False, f"node {row.node} is cordoned", 0))

    async def _drain(
        self, rows: Sequence[Row], nodes: Mapping[str, str], change: Change, deadline_ms: int, *, leaving: bool
    ) -> None:
        """`nodes`: those that take no worker from now on, with their ids."""
        counted = [row for row in rows if not row.leaving] if leaving else []
        asked = {row.worker_id: row.incarnation for row in rows if row.alive and row.incarnation}

        def wanted(before: Desired) -> Desired:
            fewer = {role: sum(row.role is role for row in counted) for role in Role}
            return replace(
                before,
                prefill=max(0, before.prefill - fewer[Role.PREFILL]),
                decode=max(0, before.decode - fewer[Role.DECODE]),
                restarts=MappingProxyType({**_present(before.restarts, self._controller.state), **asked}),
                closed=closed_with(before.closed, with_id(nodes)),
            )

        await self._controller.change(wanted, change)
        kind = "drain" if leaving else "restart"
        for row in rows:
            self._controller.hear(DrainAsked(row.worker_id, leaving, f"{kind} asked for", deadline_ms))
            self._controller.record(kind, row.worker_id, f"asked for by {change.actor}", change)
        for node in with_id(nodes):
            self._controller.record("drain", "fleet", f"node {node} takes no worker until it is uncordoned", change)

    async def _node_ids(self, nodes: Sequence[str]) -> dict[str, str]:
        """Those of the named nodes that are known, with their ids; of a name with two lives that of the later."""
        state = self._controller.state
        rows = sorted(state.rows.values(), key=lambda row: row.alive)
        held = {row.node: row.node_id for row in rows if row.node in nodes}
        missing = set(nodes) - held.keys()
        shut = {**state.desired.closed, **state.desired.cordoned_nodes}
        known = {name: node_id for name, node_id in shut.items() if name in nodes} | held
        if not missing:
            return known  # and the launcher, which may be slow or away, need not be asked
        try:
            async with asyncio.timeout(NODES_S):
                listed = await self._controller.hands.nodes()
        except TimeoutError:
            return known
        return known | {row.node: row.node_id for row in listed if row.alive and row.node in missing}

    def _plan(self, after: Desired) -> tuple[tuple[str, ...], dict[Role, int]]:
        """Who goes, decode first, and how many come."""
        state = self._controller.state
        removed: list[str] = []
        added: dict[Role, int] = {}
        for role in ROLES:
            staying = [row for row in state.of(role) if not row.leaving]
            count = after.prefill if role is Role.PREFILL else after.decode
            removed += leavers(staying, len(staying) - count)
            added[role] = max(0, count - len(staying))
        return tuple(removed), added

    def _chosen(
        self, workers: Sequence[str], nodes: Sequence[str], ids: Mapping[str, str], *, placing: bool = False
    ) -> list[Row]:
        """`placing`: also workers that have no place yet and can have no other. Raises NotFound, and InvalidInput where
        nothing is named. A node without workers adds none."""
        if not workers and not nodes:
            raise InvalidInput("nothing_named", "name at least one worker or node", field="workers")
        rows = {worker_id: self._controller.row(worker_id) for worker_id in workers}
        state = self._controller.state
        for node in nodes:
            if node not in ids:
                known = ", ".join(sorted({row.node for row in state.rows.values() if row.node}))
                raise NotFound(
                    "unknown_node", f"no node {node[:64]!r}; those with workers: {known or 'none'}", field="nodes"
                )
            there = on_node(state, node, only=placing and not ids[node])
            rows.update({row.worker_id: row for row in there})
        return list(rows.values())

    def _require_others(self, going: Iterable[Row]) -> None:
        """Raises Refused where a role would be left without a ready worker."""
        names = {row.worker_id for row in going}
        state = self._controller.state
        for role in {row.role for row in going if row.phase is Phase.READY}:
            left = [
                row for row in state.of(role)
                if row.phase is Phase.READY and not row.leaving and row.worker_id not in names
                and not state.desired.is_cordoned(row.worker_id, row.incarnation)
            ]  # fmt: skip
            if not left:
                raise Refused(
                    "last_worker",
                    f"no other {role.value} worker is ready: start one first, or force it",
                    field="workers",
                )

    async def _repeated(self, change: Change) -> bool:
        """Whether this very change was carried out before under its key. If not, the revision that its caller expects
        is the fleet's, also where the change will turn out to be none. Raises Conflict."""
        if change.idempotency_key:
            kept = await self._controller.registry.recall(change.idempotency_key)
            if kept is not None:
                check_same(kept, change)
                return True
        await self._controller.expect(change)
        return False

    async def _remember(self, change: Change) -> None:
        if change.idempotency_key and not change.dry_run:
            answer = kept_of(change, self._controller.state.desired.revision)
            await self._controller.registry.remember(change.idempotency_key, answer, ANSWER_TTL_MS)

    def _view(self, *, repeated: bool = False) -> FleetView:
        controller = self._controller
        state, now_ms = controller.state, controller.clocks.now_ms()
        rows = sorted(state.rows.values(), key=lambda row: (row.role.value, row.worker_id))
        reason = unsettled(state)
        if controller.registry_error:
            reason = "; ".join(filter(None, (reason, f"the registry cannot be read: {controller.registry_error}")))
        if controller.room_error:
            reason = "; ".join(filter(None, (reason, f"nodes do not follow: {controller.room_error}")))
        return FleetView(
            desired=state.desired,
            workers=tuple(self._worker_row(row, now_ms) for row in rows),
            settled=not reason,
            reason=reason,
            repeated=repeated,
            endpoint=self.endpoint,
        )

    def _worker_row(self, row: Row, now_ms: float) -> WorkerRow:
        status, asked_ms = self._controller.status_of(row)
        return WorkerRow(
            worker_id=row.worker_id,
            role=row.role,
            phase=row.phase.value,
            reason=row.reason or (self._controller.room_error if row.alive and not row.endpoint else ""),
            phase_age_ms=max(0, int(now_ms) - row.since_ms),
            cordoned=self._controller.state.desired.is_cordoned(row.worker_id, row.incarnation),
            endpoint=row.endpoint,
            incarnation=row.incarnation,
            node=row.node,
            restarts=row.restarts,
            drain_left_ms=max(0, row.deadline_ms - int(now_ms)) if row.phase is Phase.DRAINING else 0,
            status=status,
            asked_ms=asked_ms,
        )

    # --- autoscaling --------------------------------------------------------------------------------------------------

    async def _autoscale_turn(self, autoscaler: Autoscaler) -> None:
        await asyncio.sleep(self._autoscale_ms / 1000)
        try:
            try:
                await self._autoscale(autoscaler)
            finally:
                await self._decisions.keep()
        except GenlockError as error:
            self._controller.record("autoscale", "fleet", f"not carried out: {error.message}")
        except Exception as unexpected:
            self._surprised()
            surprise(unexpected, "a decision of the autoscaler")

    def _surprised(self) -> None:
        self.surprises += 1

    async def _autoscale(self, autoscaler: Autoscaler) -> None:
        desired = self._controller.state.desired
        if not desired.autoscale or desired.autoscale_paused:
            return
        verdict = await autoscaler.decide(self._view(), self._controller.clocks.now_ms())
        if verdict is None:
            return
        if verdict.record is not None:
            self._decisions.add(verdict.record)
        prefill, decode = verdict.prefill, verdict.decode
        if (prefill, decode) != (None, None) and (prefill, decode) != (desired.prefill, desired.decode):
            change = Change(AUTOSCALER, verdict.reason, expected_revision=desired.revision)
            await self.scale(prefill, decode, change)
        for role, before, after in ((Role.PREFILL, desired.prefill, prefill), (Role.DECODE, desired.decode, decode)):
            self.moved[role, _moved(before, after)] += 1


def _moved(before: int, after: int | None) -> Moved:
    if after is None or after == before:
        return Moved.HELD
    return Moved.UP if after > before else Moved.DOWN


def _check_counts(prefill: int | None, decode: int | None, change: Change) -> None:
    for name, count in (("prefill", prefill), ("decode", decode)):
        if count is None:
            continue
        if not 0 <= count <= MAX_WORKERS:
            raise InvalidInput("bad_count", f"{name} must be 0 to {MAX_WORKERS}, is {count}", field=name)
        if count == 0 and change.actor != AUTOSCALER:
            raise Refused("last_worker", f"without {name} workers nothing is served: keep at least one", field=name)


def _check_current(before: Desired, current: tuple[int | None, int | None]) -> None:
    """Raises Conflict where the caller saw other counts."""
    for name, seen, count in (
        ("current_prefill", current[0], before.prefill), ("current_decode", current[1], before.decode),
    ):  # fmt: skip
        if seen is not None and seen != count:
            role = name.removeprefix("current_")
            raise Conflict("counts_moved", f"{count} {role} workers are wanted now, not {seen}", field=name)


def _present(restarts: Mapping[str, int], state: State) -> dict[str, int]:
    """Only those that still concern a life."""
    return {
        worker_id: incarnation
        for worker_id, incarnation in restarts.items()
        if worker_id in state.rows and state.rows[worker_id].incarnation == incarnation
    }
