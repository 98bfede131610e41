"""Nodes that take no worker: which are kept as drained or cordoned, and which workers such a change is about. Pure.

A node has an id, or it is the only one there is (that of `genlock up`'s own): no worker can be kept away from that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from cluster.control.state import Row, State
from cluster.registry.records import Desired

# Closed nodes that are remembered.
MAX_CLOSED = 256


def on_node(state: State, node: str, *, only: bool = False) -> list[Row]:
    """The workers of a node. `only`: there is no other node, so those that have no place yet come up there too."""
    return [row for row in state.rows.values() if row.node == node or (only and not row.node)]


def closed_with(before: Mapping[str, str], nodes: Mapping[str, str]) -> Mapping[str, str]:
    """Nodes that were closed before, and these. What is gone by now is not looked for: the last ones are kept."""
    kept = {name: node_id for name, node_id in before.items() if name not in nodes} | dict(nodes)
    return MappingProxyType(dict(list(kept.items())[-MAX_CLOSED:]))


def with_id(nodes: Mapping[str, str]) -> dict[str, str]:
    """Those that can be closed at all."""
    return {name: node_id for name, node_id in nodes.items() if node_id}


def opened(before: Mapping[str, str], nodes: Collection[str]) -> Mapping[str, str]:
    return MappingProxyType({name: node_id for name, node_id in before.items() if name not in nodes})


def is_closed(closed: Mapping[str, str], node: str, node_id: str) -> bool:
    """By its id where it has one: a host that came back has another."""
    return node_id in closed.values() if node_id else closed.get(node) == ""


def cordoned(before: Desired, names: frozenset[str], lives: Mapping[str, int], nodes: Mapping[str, str]) -> Desired:
    """What is wanted once these workers, these lives and these nodes, with their ids, take no new requests."""
    return replace(
        before, cordoned=before.cordoned | names,
        cordoned_lives=MappingProxyType({**before.cordoned_lives, **lives}),
        cordoned_nodes=closed_with(before.cordoned_nodes, nodes),
    )  # fmt: skip


def uncordoned(before: Desired, state: State, chosen: frozenset[str], nodes: Collection[str]) -> Desired:
    """What is wanted once these workers and nodes take requests again. With the only node there is, the names of
    workers that are gone are forgotten too: else one that is scaled up later would come up cordoned."""
    only = any(before.cordoned_nodes.get(node) == "" for node in nodes)
    gone = before.cordoned - state.rows.keys() if only else frozenset()
    lives = {name: life for name, life in before.cordoned_lives.items() if name not in chosen}
    return replace(
        before, cordoned=before.cordoned - chosen - gone, cordoned_lives=MappingProxyType(lives),
        closed=opened(before.closed, nodes), cordoned_nodes=opened(before.cordoned_nodes, nodes),
    )  # fmt: skip
