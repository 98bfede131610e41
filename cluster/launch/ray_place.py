"""Where a worker goes on Ray: what it demands, what nodes supply, and what to say when that does not fit. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cluster.settings import WorkersConfig
from kvstore.errors import NoCapacity

SLACK = 1e-6
# Ray gives it to every node.
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Supply:
    """One node: everything that it has, and its labels."""

    node: str
    alive: bool
    total: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    node_id: str = ""


def demand_of(workers: WorkersConfig) -> dict[str, float]:
    """The one bundle of a worker's placement group."""
    demand = {"CPU": workers.cpus}
    if workers.gpus:
        demand["GPU"] = workers.gpus
    for pair in filter(None, workers.resources.split(",")):
        name, amount = pair.split("=")
        demand[name] = float(amount)
    return demand


def labels_of(workers: WorkersConfig) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in filter(None, workers.labels.split(",")))


def selector_of(labels: Mapping[str, str], avoid: Iterable[str], nodes: Iterable[Supply]) -> dict[str, str]:
    """Ray's label selector of a worker: the labels that it asks for, and not a node that it must avoid. Nodes that are
    gone need not be avoided. A node that the settings name by its id stays the one."""
    going = sorted(frozenset(avoid) & {supply.node_id for supply in nodes if supply.alive})
    return ({NODE_LABEL: f"!in({','.join(going)})"} if going else {}) | dict(labels)


def supplies(nodes: Iterable[Mapping[str, Any]]) -> tuple[Supply, ...]:
    """What `ray.nodes()` says. Nodes of one name are told apart by their ids."""
    listed = list(nodes)
    names = [str(node.get("NodeName") or node.get("NodeID", "")) for node in listed]
    return tuple(
        Supply(
            node=name if names.count(name) == 1 else str(node["NodeID"])[:12],
            alive=bool(node.get("Alive")),
            total=MappingProxyType({key: float(value) for key, value in (node.get("Resources") or {}).items()}),
            labels=MappingProxyType(dict(node.get("Labels") or {})),
            node_id=str(node.get("NodeID", "")),
        )
        for name, node in zip(names, listed, strict=True)
    )


def fits(demand: Mapping[str, float], labels: Mapping[str, str], supply: Supply) -> bool:
    """Whether the empty node could take it."""
    return (
        supply.alive
        and all(supply.labels.get(key) == value for key, value in labels.items())
        and all(supply.total.get(key, 0.0) + SLACK >= amount for key, amount in demand.items())
    )


def places(demand: Mapping[str, float], labels: Mapping[str, str], nodes: Iterable[Supply]) -> int:
    """How many such workers the empty cluster could take, each whole on one node."""
    needed = {key: amount for key, amount in demand.items() if amount > 0}
    return sum(
        min(int((supply.total.get(key, 0.0) + SLACK) / amount) for key, amount in needed.items())
        for supply in nodes
        if needed and fits(demand, labels, supply)
    )


def first_without(worker_ids: Iterable[str], room: int, started: Container[str]) -> str:
    """The first worker without a place, where `room` of them have one: those that are started have theirs already."""
    return sorted(worker_ids, key=lambda worker_id: worker_id not in started)[room]


def no_place(
    worker_id: str, demand: Mapping[str, float], labels: Mapping[str, str], nodes: Iterable[Supply],
    free: Mapping[str, float], why: str, avoid: frozenset[str] = frozenset(),
) -> NoCapacity:  # fmt: skip
    """Names what is demanded, what each node has in all, and what is free of it."""
    wanted = _words(demand) + ("".join(f", {key}={value}" for key, value in sorted(labels.items())) if labels else "")
    have = "; ".join(
        f"{supply.node} has {_words({key: supply.total.get(key, 0.0) for key in demand})}"
        + (" but was drained or cordoned (`genlock uncordon` opens it)" if supply.node_id in avoid else "")
        for supply in nodes if supply.alive
    )  # fmt: skip
    spare = _words({key: free.get(key, 0.0) for key in demand})
    field_name = "workers.gpus" if demand.get("GPU") else "workers.cpus"
    return NoCapacity(
        "no_place",
        f"no place for {worker_id}: it needs {wanted} on one node; {have or 'there is no node'}; free in all: {spare}. "
        f"{why}",
        field=field_name,
    )


def _words(amounts: Mapping[str, float]) -> str:
    names = {"CPU": "CPUs", "GPU": "GPUs"}
    return ", ".join(f"{amount:g} {names.get(key, key)}" for key, amount in amounts.items())
