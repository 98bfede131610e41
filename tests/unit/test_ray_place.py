"""Demand and supply of places on Ray."""

from __future__ import annotations

import pytest

from cluster.config import load
from cluster.launch.ray_place import (
    Supply,
    demand_of,
    first_without,
    fits,
    labels_of,
    no_place,
    places,
    selector_of,
    supplies,
)
from kvstore.errors import InvalidInput

NODES = (
    Supply("a", True, {"CPU": 96.0, "GPU": 8.0, "rdma": 1.0}, {"rack": "r1"}),
    Supply("b", True, {"CPU": 96.0, "GPU": 4.0}, {"rack": "r2"}),
    Supply("c", False, {"CPU": 96.0, "GPU": 8.0}, {"rack": "r1"}),
)


def workers(**flags: object):
    return load(flags={f"workers.{name}": value for name, value in flags.items()}).config.workers


def test_demand_is_one_bundle():
    assert demand_of(workers()) == {"CPU": 0.5}
    assert demand_of(workers(cpus=32, gpus=8, resources="rdma=1,hugepages=0.5")) == {
        "CPU": 32.0, "GPU": 8.0, "rdma": 1.0, "hugepages": 0.5,
    }  # fmt: skip
    assert labels_of(workers(labels="rack=r1,ray.io/zone=z")) == {"rack": "r1", "ray.io/zone": "z"}


@pytest.mark.parametrize("flags", [{"resources": "rdma"}, {"resources": "=1"}, {"labels": "a"}, {"gpus": -1}])
def test_bad_demands_name_their_setting(flags: dict):
    [name] = flags
    with pytest.raises(InvalidInput) as caught:
        workers(**flags)
    assert caught.value.field == f"workers.{name}"


@pytest.mark.parametrize(
    ("demand", "labels", "count"),
    [
        ({"CPU": 32.0, "GPU": 4.0}, {}, 3),
        ({"CPU": 32.0, "GPU": 8.0}, {}, 1),
        ({"CPU": 1.0, "GPU": 4.0}, {"rack": "r1"}, 2),
        ({"GPU": 9.0}, {}, 0),
        ({"GPU": 12.0}, {}, 0),  # no node has it whole
        ({"CPU": 1.0, "rdma": 1.0}, {}, 1),
        ({"CPU": 0.1}, {}, 1920),
    ],
)
def test_places_are_whole_nodes(demand: dict, labels: dict, count: int):
    assert places(demand, labels, NODES) == count
    assert any(fits(demand, labels, node) for node in NODES) == (count > 0)


def test_a_drained_node_is_avoided_while_it_is_there():
    nodes = [Supply(name, name != "c", {"CPU": 4.0}, node_id=f"id-{name}") for name in "abc"]
    assert selector_of({"rack": "r1"}, {"id-b", "id-a"}, nodes) == {"ray.io/node-id": "!in(id-a,id-b)", "rack": "r1"}
    assert selector_of({"rack": "r1"}, {"id-c", "id-gone"}, nodes) == {"rack": "r1"}, "the dead need not be avoided"
    assert selector_of({"ray.io/node-id": "id-a"}, {"id-a"}, nodes) == {"ray.io/node-id": "id-a"}
    error = no_place("decode-0", {"CPU": 1.0}, {}, nodes, {"CPU": 4.0}, "Why.", frozenset({"id-b"}))
    assert "a has 4 CPUs; b has 4 CPUs but was drained or cordoned (`genlock uncordon` opens it)" in error.message


def test_a_refusal_names_demand_and_supply():
    error = no_place("decode-0", {"CPU": 1.0, "GPU": 9.0}, {"rack": "r1"}, NODES, {"CPU": 3.0}, "Why.")
    assert (error.reason, error.field) == ("no_place", "workers.gpus")
    for part in ("decode-0", "9 GPUs", "rack=r1", "a has 96 CPUs, 8 GPUs", "b has", "free in all: 3 CPUs, 0 GPUs"):
        assert part in error.message
    assert "c has" not in error.message, "a dead node has nothing"


def test_nodes_of_one_name_are_told_apart():
    raw = [
        {"NodeID": f"{index}" * 20, "NodeName": "127.0.0.1", "Alive": True, "Resources": {"CPU": 1}} for index in (1, 2)
    ]
    assert [node.node for node in supplies(raw)] == ["1" * 12, "2" * 12]


def test_who_has_no_place_is_not_one_that_runs():
    wanted = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert first_without(wanted, 2, {"prefill-0", "decode-0"}) == "decode-1"
    assert first_without(wanted, 3, {"decode-2", "decode-0"}) == "decode-1"
    assert first_without(wanted, 0, {}) == "prefill-0"
