"""One JSON patch from what there is and what is needed: replicas fall only with the names of pods that are empty."""

from __future__ import annotations

import copy
from dataclasses import replace

import jsonpatch
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.hands import Need
from cluster.control.needs import needs_of
from cluster.control.state import Phase, Row, State
from cluster.kube.plan import Fit, Plan, Pod, check_bounds, plan, read_groups, read_pods
from cluster.registry.records import Desired, WorkerRecord
from cluster.roles import Role
from kvstore.errors import NoCapacity, NotFound, Refused, Unavailable

FIT = Fit({Role.PREFILL: "prefill", Role.DECODE: "decode"}, {Role.PREFILL: 1, Role.DECODE: 1})
PAIRS = replace(FIT, per_pod={Role.PREFILL: 1, Role.DECODE: 2})
D, P = Role.DECODE, Role.PREFILL


def cluster(decode: int | None = 3, low: int = 1, high: int = 5, **more) -> dict:
    own = {"groupName": "decode", "minReplicas": low, "maxReplicas": high, **more}
    own |= {} if decode is None else {"replicas": decode}
    return {"spec": {"workerGroupSpecs": [{"groupName": "prefill", "replicas": 1, "maxReplicas": 4}, own]}}


def pods(*names: str, **more) -> list[Pod]:
    return [Pod("p0", "prefill"), *(Pod(name, "decode", **more) for name in names)]


def need(wanted: int, *on: str, placing: bool = False) -> dict[Role, Need]:
    return {P: Need(1, False, (frozenset({"p0"}),)), D: Need(wanted, placing, tuple(frozenset({pod}) for pod in on))}


def planned(spec: dict, there: list[Pod], needs: dict[Role, Need], fit: Fit = FIT) -> Plan:
    return plan(read_groups(spec, fit), there, needs, fit)


def doomed(made: Plan) -> list[str]:
    found = [
        one["value"]["workersToDelete"] for one in made.patch if one["path"].endswith("Strategy") and one["op"] == "add"
    ]
    return found[0] if found else []


@pytest.mark.parametrize(
    ("replicas", "there", "needs", "after", "named"),
    [
        (3, ["a", "b", "c"], need(3, "a", "b", "c"), 3, []),
        (3, ["a", "b", "c"], need(4, "a", "b", "c"), 4, []),
        # c is drained and gone: exactly it.
        (3, ["a", "b", "c"], need(2, "a", "b"), 2, ["c"]),
        (3, ["a", "b", "c"], need(2, "b", "c"), 2, ["a"]),
        (3, ["a", "b", "c"], need(1, "b"), 1, ["a", "c"]),
        # Two are empty and one is too many.
        (3, ["a", "b", "c"], need(2, "b"), 2, ["a"]),
        # Fewer are wanted, all still work.
        (3, ["a", "b", "c"], need(2, "a", "b", "c"), 3, []),
        # Somebody looks for a place, or is where no pod is known: nothing falls.
        (3, ["a", "b", "c"], need(2, "a", placing=True), 3, []),
        (3, ["a", "b", "c"], need(2, "a", "elsewhere"), 3, []),
        # ... but they may rise.
        (3, ["a", "b", "c"], need(4, "a", placing=True), 4, []),
        # The bounds.
        (2, ["a", "b"], need(0), 1, ["a"]),
        (1, ["a"], need(0), 1, []),
        # More pods than replicas: KubeRay is about to choose some, and no more are added to that.
        (2, ["a", "b", "c"], need(1, "b"), 2, []),
        (None, [], need(2), 2, []),
    ],
)
def test_replicas_and_names(replicas, there, needs, after, named):
    made = planned(cluster(replicas), pods(*there), needs)
    assert (made.replicas[D], doomed(made), made.short) == (after, named, None)
    assert bool(made.patch) == (after != replicas) == bool(made.done)


def test_a_fleet_that_goes_to_zero_needs_no_pods_where_the_bounds_say_so_and_gets_them_back():
    asleep = planned(cluster(1, low=0), pods("a"), need(0))
    assert (asleep.replicas[D], doomed(asleep)) == (0, ["a"])
    assert planned(cluster(0, low=0), pods(), need(0)).patch == ()
    woken = planned(cluster(0, low=0), pods(), need(1, placing=True))
    assert (woken.replicas[D], woken.short) == (1, None)


def test_the_patch_tests_what_it_was_made_for_and_is_one():
    made = planned(
        cluster(3, scaleStrategy={"x": 1, "workersToDelete": ["b", "gone"]}),
        pods("a", "b", "c", "d"),
        need(2, "a", "c"),
    )
    at = "/spec/workerGroupSpecs/1"
    assert list(made.patch) == [
        {"op": "test", "path": f"{at}/groupName", "value": "decode"},
        {"op": "test", "path": f"{at}/replicas", "value": 3},
        {"op": "replace", "path": f"{at}/replicas", "value": 2},
        {"op": "test", "path": f"{at}/scaleStrategy", "value": {"x": 1, "workersToDelete": ["b", "gone"]}},
        # KubeRay may not have come to b yet: without its name it would choose another pod.
        {"op": "add", "path": f"{at}/scaleStrategy", "value": {"x": 1, "workersToDelete": ["b", "d"]}},
    ]
    assert made.done == ("decode replicas 3 to 2: d goes",)


def test_a_pod_that_was_named_and_works_again_is_not_named_any_more():
    made = planned(cluster(2, scaleStrategy={"workersToDelete": ["c"]}), pods("a", "b", "c"), need(3, "a", "b", "c"))
    assert (made.replicas[D], doomed(made)) == (3, [])
    assert made.patch[-1]["value"] == {"workersToDelete": []}


def test_pods_that_end_or_are_named_already_are_not_given_up_twice():
    named = cluster(2, scaleStrategy={"workersToDelete": ["c"]})
    assert planned(named, pods("a", "b", "c"), need(1, "a")).replicas[D] == 1
    assert doomed(planned(named, pods("a", "b", "c"), need(1, "a"))) == ["c", "b"]
    assert planned(cluster(2), [*pods("a"), Pod("b", "decode", ends=True)], need(1, "a")).replicas[D] == 2


def test_a_pod_that_does_not_run_goes_first():
    there = [*pods("a", "b"), Pod("z", "decode", running=False)]
    assert doomed(planned(cluster(3), there, need(2, "a"))) == ["z"]


def test_several_workers_share_a_pod():
    def on(*names: str) -> dict[Role, Need]:
        return need(3, *names)

    assert planned(cluster(1), pods("a"), on("a", "a"), PAIRS).replicas[D] == 2
    # One worker on each of three pods: two would do, but none is empty.
    assert not planned(cluster(3), pods("a", "b", "c"), on("a", "b", "c"), PAIRS).patch
    assert doomed(planned(cluster(3), pods("a", "b", "c"), on("a", "a", "c"), PAIRS)) == ["b"]


def test_what_the_bounds_forbid_is_refused_by_name_and_done_as_far_as_they_go():
    made = planned(cluster(3, high=4), pods("a", "b", "c"), need(6, "a", "b", "c"))
    assert made.replicas[D] == 4
    assert isinstance(made.short, NoCapacity)
    assert made.short.reason == "above_max_replicas"
    for words in ("6 decode workers", "6 pods", "maxReplicas are 4"):
        assert words in made.short.message
    with pytest.raises(NoCapacity, match="6 decode workers"):
        check_bounds(read_groups(cluster(high=4), FIT), {D: 6, P: 1}, FIT)
    check_bounds(read_groups(cluster(high=4), FIT), {D: 4, P: 4}, FIT)


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        ({"spec": {"workerGroupSpecs": [{"groupName": "prefill"}]}}, NotFound, "kube.decode_group"),
        ({"spec": {**cluster()["spec"], "enableInTreeAutoscaling": True}}, Refused, "enableInTreeAutoscaling"),
        (cluster(numOfHosts=2), Refused, "numOfHosts"),
        (cluster(decode="3"), Unavailable, r"workerGroupSpecs\[1\].replicas"),
        (cluster(scaleStrategy=["a"]), Unavailable, "scaleStrategy"),
        (cluster(scaleStrategy={"workersToDelete": "a"}), Unavailable, "workersToDelete"),
        ({"spec": {"workerGroupSpecs": 5}}, Unavailable, "workerGroupSpecs"),
        ({}, Unavailable, "spec"),
    ],
)
def test_what_cannot_be_read_is_a_typed_error(spec, error, match):
    with pytest.raises(error, match=match):
        read_groups(spec, FIT)


def test_pods_are_read_by_their_group_and_end():
    def pod(name: str, phase: str = "Running", group: str | None = "decode", **meta) -> dict:
        labels = {} if group is None else {"ray.io/group": group}
        return {"metadata": {"name": name, "labels": labels, **meta}, "status": {"phase": phase}}

    found = read_pods(
        [
            pod("a"),
            pod("b", "Pending"),
            pod("c", deletionTimestamp="2026-01-01T00:00:00Z"),
            pod("d", "Failed"),
            pod("h", group=None),
        ]
    )
    assert found == (
        Pod("a", "decode"), Pod("b", "decode", running=False), Pod("c", "decode", ends=True),
        Pod("d", "decode", ends=True, running=False),
    )  # fmt: skip
    with pytest.raises(Unavailable, match="metadata"):
        read_pods([{}])


# --- properties -------------------------------------------------------------------------------------------------------

NAMES = [f"d{index}" for index in range(6)]


@st.composite
def worlds(draw):
    low = draw(st.integers(0, 3))
    high = draw(st.integers(low, 6))
    spec = cluster(draw(st.integers(0, 7)), low=low, high=high)
    there = draw(st.lists(st.sampled_from(NAMES), unique=True))
    listed = [Pod(name, "decode", draw(st.booleans()), draw(st.booleans())) for name in there]
    earlier = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    if earlier:
        spec["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = {"workersToDelete": earlier}
    on = draw(st.lists(st.sampled_from([*NAMES, "unknown"]), max_size=5))
    needs = need(draw(st.integers(0, 8)), *on, placing=draw(st.booleans()))
    per_pod = draw(st.integers(1, 3))
    return spec, [Pod("p0", "prefill"), *listed], needs, replace(FIT, per_pod={P: 1, D: per_pod})


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_no_pod_that_works_is_named_and_no_bound_is_passed_and_nothing_is_done_twice(world):
    spec, there, needs, fit = world
    made = planned(spec, there, needs, fit)
    if not made.patch:
        return
    after = jsonpatch.apply_patch(copy.deepcopy(spec), [dict(one) for one in made.patch])
    old, new = spec["spec"]["workerGroupSpecs"][1], after["spec"]["workerGroupSpecs"][1]
    assert new["minReplicas"] <= new["replicas"] <= new["maxReplicas"]
    busy = {name for places in needs[D].places for name in places}
    before = set(old.get("scaleStrategy", {}).get("workersToDelete", ()))
    named = set(new.get("scaleStrategy", {}).get("workersToDelete", ()))
    # Where nothing is named anew the list may stay as it was.
    if named != before:
        assert not named & busy
    fresh = named - before
    assert not fresh & busy
    assert fresh <= {pod.name for pod in there if pod.group == "decode" and not pod.ends}
    assert len(fresh) == max(0, old["replicas"] - new["replicas"])
    assert not planned(after, there, needs, fit).patch


# --- needs ------------------------------------------------------------------------------------------------------------


def row(name: str, node: str = "a", endpoint: str = "e", phase: Phase = Phase.READY) -> Row:
    return Row(name, Role(name.split("-")[0]), phase, "", 0, life=1, endpoint=endpoint, node=node)


def state(*rows: Row, decode: int = 2) -> State:
    return State(desired=Desired(decode=decode, prefill=1), rows={one.worker_id: one for one in rows})


def record(name: str, node: str = "", pod: str = "") -> WorkerRecord:
    return WorkerRecord(name, Role(name.split("-")[0]), "e", 7, "f", node=node, pod=pod)


def test_needs_come_from_rows_and_records():
    there = needs_of(state(row("decode-0"), row("decode-1", "b", phase=Phase.DRAINING)))[D]
    assert there == Need(2, False, (frozenset({"a"}), frozenset({"b"})))
    # A life that is over holds nothing; one that has not told where it is may be anywhere.
    assert needs_of(state(row("decode-0", phase=Phase.STOPPED)))[D] == Need(2)
    for unknown in (row("decode-0", node=""), row("decode-0", endpoint="", phase=Phase.STARTING)):
        assert needs_of(state(unknown))[D].placing
    # The worker's own word counts too, also where the controller has no row of it.
    assert needs_of(state(row("decode-0", node="")), [record("decode-0", "x", "y")])[D].places == (
        frozenset({"x", "y"}),
    )
    assert needs_of(state(), [record("decode-3", "x")])[D] == Need(2, False, (frozenset({"x"}),))
    assert needs_of(state(), [record("decode-3", "x")])[P] == Need(1)
