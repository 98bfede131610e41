"""The fleet's RPCs on a controller in this process: checked requests in, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from cluster.autoscale.policy import leaves, policy_from, policy_of, text_of
from cluster.control.api import FleetControl, FleetView
from cluster.operators.convert import (
    at_least,
    change_of,
    event_message,
    fleet_message,
    names_of,
    node_message,
    worker_message,
)
from cluster.roles import MAX_WORKERS
from cluster.strict_yaml import YamlReader, shown
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import InvalidInput, NotFound

DEFAULT_LIMIT = 100
MAX_LIMIT = 10_000
WATCH_POLL_S = 0.3
CLUSTER_TEXT = YamlReader("bad_cluster_file", "text", max_chars=65_536)
# What a text that is applied may name.
APPLIED = ("prefill", "decode", "autoscale")

Operation = Callable[[Any, str], Awaitable[Message]]


class FleetOperations:
    """One method for each RPC: `(request, actor)`. Raises what FleetControl raises, and InvalidInput for the request's
    own fields."""

    def __init__(self, control: FleetControl, now_ms: Callable[[], float]) -> None:
        """`now_ms`: Unix milliseconds, for `since_ms` of events."""
        self._control = control
        self._now_ms = now_ms

    async def call(self, name: str, request: Any, actor: str) -> Message:
        """The RPC of that name."""
        operation: Operation = getattr(self, _METHODS[name])
        return await operation(request, actor)

    async def watch(self, request: pb.ListEventsRequest, _actor: str) -> AsyncIterator[pb.FleetEvent]:
        """Events as they come, for ever: first those that are kept, the oldest first."""
        after = at_least(request.after, 0, "after")
        while True:
            page = await self._control.events(after, MAX_LIMIT)
            oldest_ms = self._oldest_ms(request)
            for event in page:
                # Those that are too old are passed for good, else they would be read again with each look.
                after = event.sequence
                if event.at_ms >= oldest_ms:
                    yield event_message(event)
            if len(page) < MAX_LIMIT:
                await asyncio.sleep(WATCH_POLL_S)

    async def get_fleet(self, _request: pb.GetFleetRequest, _actor: str) -> pb.FleetView:
        return fleet_message(await self._control.view())

    async def list_nodes(self, _request: pb.ListNodesRequest, _actor: str) -> pb.ListNodesResponse:
        return pb.ListNodesResponse(nodes=[node_message(row) for row in await self._control.nodes()])

    async def list_events(self, request: pb.ListEventsRequest, _actor: str) -> pb.ListEventsResponse:
        limit = min(MAX_LIMIT, at_least(request.limit, 0, "limit") or DEFAULT_LIMIT)
        oldest_ms = self._oldest_ms(request)
        if at_least(request.after, 0, "after"):
            # A whole batch: those that are too old do not count into the page.
            events = await self._control.events(request.after, MAX_LIMIT if request.since_ms else limit)
        else:
            events = await self._control.last_events(limit)
        recent = [event for event in events if event.at_ms >= oldest_ms]
        return pb.ListEventsResponse(events=[event_message(event) for event in recent[:limit]])

    async def describe_worker(self, request: pb.DescribeWorkerRequest, _actor: str) -> pb.DescribeWorkerResponse:
        view = await self._control.view()
        rows = {row.worker_id: row for row in view.workers}
        if request.worker_id not in rows:
            known = ", ".join(sorted(rows)) or "none"
            raise NotFound("unknown_worker", f"no worker {request.worker_id[:64]!r}; known: {known}", field="worker_id")
        events = await self._control.last_events(MAX_LIMIT)
        own = [event_message(event) for event in events if event.subject == request.worker_id]
        return pb.DescribeWorkerResponse(worker=worker_message(rows[request.worker_id]), events=own[-DEFAULT_LIMIT:])

    async def scale(self, request: pb.ScaleRequest, actor: str) -> pb.ScaleResponse:
        prefill = _count(request, "prefill")
        decode = _count(request, "decode")
        if prefill is None and decode is None:
            raise InvalidInput("bad_request", "name prefill, decode or both", field="prefill")
        plan = await self._control.scale(
            prefill,
            decode,
            change_of("Scale", request, actor),
            current=(_count(request, "current_prefill"), _count(request, "current_decode")),
        )
        return pb.ScaleResponse(
            fleet=fleet_message(plan.fleet),
            removed=plan.removed,
            added_prefill=plan.added_prefill,
            added_decode=plan.added_decode,
        )

    async def cordon(self, request: pb.CordonRequest, actor: str) -> pb.FleetView:
        return await self._cordon(request, actor, True)

    async def uncordon(self, request: pb.CordonRequest, actor: str) -> pb.FleetView:
        return await self._cordon(request, actor, False)

    async def drain(self, request: pb.DrainWorkersRequest, actor: str) -> pb.FleetView:
        workers, nodes = _targets(request)
        view = await self._control.drain(
            workers,
            nodes,
            change_of("Drain", request, actor),
            deadline_ms=at_least(request.deadline_ms, 0, "deadline_ms"),
            force=request.force,
            replace=request.replace,
        )
        return fleet_message(view)

    async def restart(self, request: pb.RestartRequest, actor: str) -> pb.FleetView:
        (worker,) = names_of([request.worker], "worker")
        view = await self._control.restart(
            worker,
            change_of("Restart", request, actor),
            deadline_ms=at_least(request.deadline_ms, 0, "deadline_ms"),
            force=request.force,
        )
        return fleet_message(view)

    async def apply(self, request: pb.ApplyRequest, actor: str) -> pb.ApplyResponse:
        wanted = _applied(request.text)
        view = await self._control.view()
        changes = _differences(view, wanted)
        policy = (lambda _kept: str(wanted["autoscale"])) if "autoscale" in wanted else None
        view = await self._control.apply(
            wanted.get("prefill"), wanted.get("decode"), policy, change_of("Apply", request, actor)
        )
        return pb.ApplyResponse(fleet=fleet_message(view), changes=changes)

    async def get_autoscale(self, _request: pb.GetAutoscaleRequest, _actor: str) -> pb.AutoscaleView:
        return await self._autoscale(await self._control.view())

    async def set_autoscale(self, request: pb.SetAutoscaleRequest, actor: str) -> pb.AutoscaleView:
        changes: list[pb.Change] = []

        def policy(kept: str) -> str:
            # From the policy at the moment of the change: one that was read before could have been replaced since.
            text = ""
            if request.policy.strip():
                text = text_of(policy_from(request.policy, policy_from(kept) if request.merge and kept else None))
            changes[:] = _policy_changes(kept, text)
            return text

        view = await self._control.set_autoscale(policy, None, change_of("SetAutoscale", request, actor))
        message = await self._autoscale(view)
        message.changes.extend(changes)
        return message

    async def pause_autoscale(self, request: pb.PauseAutoscaleRequest, actor: str) -> pb.AutoscaleView:
        return await self._pause(request, actor, True)

    async def resume_autoscale(self, request: pb.PauseAutoscaleRequest, actor: str) -> pb.AutoscaleView:
        return await self._pause(request, actor, False)

    async def explain_autoscale(self, request: pb.ExplainAutoscaleRequest, _actor: str) -> pb.ExplainAutoscaleResponse:
        limit = min(MAX_LIMIT, at_least(request.limit, 0, "limit") or 10)
        kept = await self._control.decisions(limit)
        return pb.ExplainAutoscaleResponse(decisions=kept)

    def _oldest_ms(self, request: pb.ListEventsRequest) -> float:
        return self._now_ms() - request.since_ms if request.since_ms else 0

    async def _cordon(self, request: pb.CordonRequest, actor: str, on: bool) -> pb.FleetView:
        workers, nodes = _targets(request)
        change = change_of("Cordon" if on else "Uncordon", request, actor)
        return fleet_message(await self._control.cordon(workers, nodes, on, change))

    async def _pause(self, request: pb.PauseAutoscaleRequest, actor: str, paused: bool) -> pb.AutoscaleView:
        change = change_of("PauseAutoscale" if paused else "ResumeAutoscale", request, actor)
        return await self._autoscale(await self._control.set_autoscale(lambda kept: kept, paused, change))

    async def _autoscale(self, view: FleetView) -> pb.AutoscaleView:
        desired = view.desired
        message = pb.AutoscaleView(
            enabled=bool(desired.autoscale),
            paused=desired.autoscale_paused,
            policy=desired.autoscale,
            revision=desired.revision,
        )
        for newest in await self._control.decisions(1):
            message.last.CopyFrom(newest)
        return message


# RPC -> method.
_METHODS: Mapping[str, str] = MappingProxyType({
    "GetFleet": "get_fleet",
    "ListNodes": "list_nodes",
    "ListEvents": "list_events",
    "DescribeWorker": "describe_worker",
    "Scale": "scale",
    "Cordon": "cordon",
    "Uncordon": "uncordon",
    "Drain": "drain",
    "Restart": "restart",
    "Apply": "apply",
    "GetAutoscale": "get_autoscale",
    "SetAutoscale": "set_autoscale",
    "PauseAutoscale": "pause_autoscale",
    "ResumeAutoscale": "resume_autoscale",
    "ExplainAutoscale": "explain_autoscale",
})  # fmt: skip
FLEET_RPCS = tuple(_METHODS)


def _count(request: pb.ScaleRequest, field: str) -> int | None:
    if not request.HasField(field):  # type: ignore[arg-type]  # one of the optional fields
        return None
    value: int = getattr(request, field)
    if not 0 <= value <= MAX_WORKERS:
        raise InvalidInput("bad_request", f"{field} = {value} must be from 0 to {MAX_WORKERS}", field=field)
    return value


def _targets(request: pb.CordonRequest | pb.DrainWorkersRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    workers, nodes = names_of(request.workers, "workers"), names_of(request.nodes, "nodes")
    if not workers and not nodes:
        raise InvalidInput("bad_request", "name at least one worker or node", field="workers")
    return workers, nodes


def _applied(text: str) -> dict[str, Any]:
    """What a text wants: counts, and the policy as canonical YAML. Raises InvalidInput naming the field."""
    tree = CLUSTER_TEXT.tree(text)
    if not isinstance(tree, dict) or not tree:
        raise InvalidInput("bad_cluster_file", f"expected a mapping with {', '.join(APPLIED)}", field="text")
    wanted: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in APPLIED:
            raise CLUSTER_TEXT.error(f"is no field; known: {', '.join(APPLIED)}", path=name)
        if name == "autoscale":
            wanted[name] = _policy_text(value)
        elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_WORKERS:
            raise CLUSTER_TEXT.error(f"= {shown(value)} must be a whole number from 0 to {MAX_WORKERS}", path=name)
        else:
            wanted[name] = value
    return wanted


def _policy_text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, dict) or not value:
        # Nothing that is false by accident may take a policy away.
        wrong = f"= {shown(value)} must be a section with fields, or null for no policy"
        raise CLUSTER_TEXT.error(wrong, path="autoscale")
    return text_of(policy_of(value))


def _differences(view: FleetView, wanted: Mapping[str, Any]) -> list[pb.Change]:
    changes = []
    for name in ("prefill", "decode"):
        before = getattr(view.desired, name)
        if name in wanted and wanted[name] != before:
            changes.append(pb.Change(field=name, before=str(before), after=str(wanted[name])))
    if "autoscale" in wanted:
        changes.extend(_policy_changes(view.desired.autoscale, wanted["autoscale"]))
    return changes


def _policy_changes(before: str, after: str) -> list[pb.Change]:
    """Field by field; a policy that comes or goes is one change."""
    if not before or not after:
        if before == after:
            return []
        shown = ("on" if before else "off", "on" if after else "off")
        return [pb.Change(field="autoscale", before=shown[0], after=shown[1])]
    old, new = leaves(policy_from(before)), leaves(policy_from(after))
    moved = [name for name in new if old[name] != new[name]]
    return [pb.Change(field=f"autoscale.{name}", before=old[name], after=new[name]) for name in moved]
