"""Choice of workers, and the table of what is known about them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.fleet import Fleet, FleetPolicy, Ledger, Load, WorkerState
from cluster.gateway.pairs import unproved
from cluster.roles import Role
from cluster.router import (
    MAX_MOVES,
    Route,
    WorkerView,
    affinity_of,
    has_room,
    may_go_elsewhere,
    route,
    route_elsewhere,
    route_many,
)
from genlock.v1 import worker_pb2
from kvstore.errors import DeadlineExceeded, GenlockError, NoCapacity, NotFound, Unavailable


def worker(name: str, role: Role = Role.DECODE, **fields: object) -> WorkerView:
    return replace(WorkerView(name, role, f"{name}:1", ready=True, request_limit=4), **fields)


P = worker("p", Role.PREFILL)


def test_least_outstanding_tokens_wins():
    chosen = route([P, worker("a", outstanding_tokens=50), worker("b", outstanding_tokens=10), worker("c")])
    assert (chosen.decode.worker_id, chosen.prefill.worker_id) == ("c", "p")


def test_ties_go_to_fewer_requests_then_to_the_smaller_id():
    busy = worker("a", outstanding_requests=1)
    assert route([P, worker("c"), busy, worker("b")]).decode.worker_id == "b"
    assert route([P, worker("b"), busy, worker("c")]).decode.worker_id == "b"


def test_a_worker_that_is_not_ready_is_not_chosen():
    assert route([P, worker("a", ready=False), worker("b", outstanding_tokens=999)]).decode.worker_id == "b"


@pytest.mark.parametrize(("role", "other"), [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)])
def test_a_missing_role_is_named(role: Role, other: Role):
    with pytest.raises(Unavailable) as caught:
        route([worker("x", other), worker("y", role, ready=False)])
    assert (caught.value.reason, caught.value.field) == (f"no_{role.value}_worker", f"workers.{role.value}")


@pytest.mark.parametrize("role", list(Role))
def test_full_workers_are_no_capacity(role: Role):
    fleet = [worker("d"), P, worker("x", role, outstanding_requests=4)]
    fleet = [replace(w, outstanding_requests=4) if w.role is role else w for w in fleet]
    with pytest.raises(NoCapacity) as caught:
        route(fleet, retry_after_ms=77)
    assert (caught.value.reason, caught.value.retry_after_ms) == (f"{role.value}_full", 77)


def test_both_ends_of_a_handoff_have_one_layout():
    fleet = [
        replace(P, layout_fingerprint="1"),
        worker("p2", Role.PREFILL, layout_fingerprint="2", outstanding_tokens=99),
        worker("d", layout_fingerprint="2"),
    ]
    assert route(fleet).prefill.worker_id == "p2"
    with pytest.raises(Unavailable) as caught:
        route(fleet[:1] + fleet[2:])
    assert caught.value.reason == "no_matching_layout"
    assert route([P, fleet[2]]).prefill.worker_id == "p"


def test_many_answers_spread():
    routes = route_many([P, worker("a"), worker("b")], tokens=10, count=4)
    assert [chosen.decode.worker_id for chosen in routes] == ["a", "b", "a", "b"]


def pair_of(chosen: Route) -> tuple[str, str]:
    return chosen.decode.worker_id, chosen.prefill.worker_id


PAIRS = [worker(f"{role.value[0]}{i}", role, outstanding_tokens=9 * (i == 2)) for role in Role for i in range(3)]


@pytest.mark.parametrize(("gone", "chosen"), [
    ((), ("d1", "p1")),
    (("d1",), ("d2", "p1")),
    (("d1", "d2"), ("d0", "p1")),  # it may have been the prefill worker that turned it away
    (("p1", "p2"), ("d1", "p0")),  # or the decode worker
])  # fmt: skip
def test_elsewhere_is_without_both_then_without_either(gone: tuple[str, ...], chosen: tuple[str, str]):
    fleet = [w for w in PAIRS if w.worker_id not in gone]
    assert pair_of(route_elsewhere(fleet, ("d0", "p0"))) == chosen


def test_elsewhere_is_never_the_pair_that_turned_it_away():
    with pytest.raises(Unavailable):
        route_elsewhere([w for w in PAIRS if w.worker_id in ("d0", "p0")], ("d0", "p0"))


def test_an_affinity_goes_elsewhere_to_one_pair_too():
    chosen = {pair_of(route_elsewhere(order, ("d0", "p0"), affinity=b"a" * 16)) for order in (PAIRS, PAIRS[::-1])}
    assert len(chosen) == 1


@pytest.mark.parametrize(("error", "begun", "moves", "may"), [
    (Unavailable("draining"), False, 0, True),
    (Unavailable("draining"), False, MAX_MOVES - 1, True),
    (Unavailable("draining"), False, MAX_MOVES, False),
    (Unavailable("draining"), True, 0, False),
    (Unavailable("drain_cut"), False, 0, False),
    (NoCapacity("decode_full"), False, 0, False),
])  # fmt: skip
def test_only_what_was_turned_away_at_a_door_goes_elsewhere(error: GenlockError, begun: bool, moves: int, may: bool):
    assert may_go_elsewhere(error, begun=begun, moves=moves) is may


def test_many_answers_are_all_or_nothing():
    with pytest.raises(NoCapacity):
        route_many([replace(P, request_limit=9), worker("a")], tokens=1, count=5)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=6), st.randoms())
def test_the_choice_is_the_minimum_whatever_the_order(loads, random):
    fleet = [
        worker(f"d{i}", outstanding_tokens=tokens, outstanding_requests=requests, ready=ready)
        for i, (tokens, requests, ready) in enumerate(loads)
    ]
    able = [w for w in fleet if w.ready and w.outstanding_requests < w.request_limit]
    shuffled = [*fleet, P]
    random.shuffle(shuffled)
    try:
        chosen = route(shuffled).decode
    except (Unavailable, NoCapacity):
        assert not able
    else:
        best = min((w.outstanding_tokens, w.outstanding_requests, w.worker_id) for w in able)
        assert (chosen.outstanding_tokens, chosen.outstanding_requests, chosen.worker_id) == best


def status(**fields: object) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(**{"worker_id": "d0", "role": "decode", **fields})


def fleet_of_one(**policy: int) -> Fleet:
    return Fleet(FleetPolicy(**policy)).added("d0", Role.DECODE, "h:1")


def test_a_worker_is_ready_only_after_an_answer():
    fleet = fleet_of_one()
    assert (fleet.get("d0").state, fleet.view({})[0].ready) == (WorkerState.UNREACHABLE, False)
    fleet = fleet.answered("d0", "h:1", status(layout_fingerprint="7"))
    view = fleet.view({"d0": Load(5, 1)})[0]
    assert (view.ready, view.outstanding_tokens, view.outstanding_requests, view.layout_fingerprint) == (
        True,
        5,
        1,
        "7",
    )


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (status(draining=True), WorkerState.DRAINING, "no new"),
        (status(step_age_ms=1001), WorkerState.UNREACHABLE, "stood still"),
        (status(worker_id="other"), WorkerState.UNREACHABLE, "other"),
        (status(role="prefill"), WorkerState.UNREACHABLE, "prefill"),
        (status(step_age_ms=1000), WorkerState.READY, ""),
    ],
)
def test_an_answer_decides_the_state(answer, state: WorkerState, words: str):
    record = fleet_of_one(stall_ms=1000).answered("d0", "h:1", answer).get("d0")
    assert record.state is state
    assert words in record.detail


def test_a_refused_connection_counts_at_once_and_a_late_answer_only_when_repeated():
    ready = fleet_of_one(late_answers=3).answered("d0", "h:1", status())
    gone = ready.failed("d0", "h:1", Unavailable("peer_unreachable", "refused"))
    assert (gone.get("d0").state, gone.get("d0").status) == (WorkerState.UNREACHABLE, None)
    late = DeadlineExceeded("deadline_exceeded")
    fleet = ready.failed("d0", "h:1", late).failed("d0", "h:1", late)
    assert fleet.get("d0").state is WorkerState.READY
    assert fleet.answered("d0", "h:1", status()).failed("d0", "h:1", late).get("d0").state is WorkerState.READY
    assert fleet.failed("d0", "h:1", late).get("d0").state is WorkerState.UNREACHABLE


def test_news_about_another_endpoint_or_worker_changes_nothing():
    fleet = fleet_of_one()
    assert fleet.answered("d0", "old:1", status()) is fleet
    assert fleet.failed("d0", "old:1", Unavailable("x")) is fleet
    assert fleet.answered("d9", "h:1", status()) is fleet
    assert not fleet.removed("d0").workers
    with pytest.raises(NotFound, match="d0"):
        fleet.get("d9")


def test_serving_needs_both_roles():
    fleet = fleet_of_one().answered("d0", "h:1", status())
    assert not fleet.serving()
    fleet = fleet.added("p0", Role.PREFILL, "h:2")
    assert not fleet.serving()
    assert fleet.answered("p0", "h:2", status(worker_id="p0", role="prefill")).serving()


def test_a_claim_is_given_back_once():
    ledger = Ledger()
    first, second = ledger.claim("d0", 10), ledger.claim("d0", 5)
    first.release()
    first.release()
    assert dict(ledger.loads) == {"d0": Load(5, 1)}
    second.release()
    assert dict(ledger.loads) == {}


# --- affinity ------------------------------------------------------------------------------------------------------

names = st.text(max_size=8)
keys = st.lists(names, min_size=1, max_size=30, unique=True)


def free_fleet(decoders: int, prefillers: int) -> list[WorkerView]:
    return [worker(f"d{i}") for i in range(decoders)] + [worker(f"p{i}", Role.PREFILL) for i in range(prefillers)]


def pair(fleet: list[WorkerView], tenant: str, key: str) -> tuple[str, str]:
    chosen = route(fleet, affinity=affinity_of(tenant, key))
    return chosen.decode.worker_id, chosen.prefill.worker_id


@given(st.integers(1, 5), st.integers(1, 5), names, keys, st.randoms())
def test_one_key_keeps_its_pair_whatever_the_load_and_the_order(decoders: int, prefillers: int, tenant, keys, random):
    fleet = free_fleet(decoders, prefillers)
    before = [pair(fleet, tenant, key) for key in keys]
    busy = [
        replace(w, outstanding_requests=random.randint(0, 3), outstanding_tokens=random.randint(0, 99)) for w in fleet
    ]
    random.shuffle(busy)
    assert [pair(busy, tenant, key) for key in keys] == before


@given(st.integers(2, 5), st.integers(2, 5), keys, st.data())
def test_a_worker_that_leaves_moves_its_own_keys_alone(decoders: int, prefillers: int, keys, data):
    fleet = free_fleet(decoders, prefillers)
    gone = data.draw(st.sampled_from([w.worker_id for w in fleet]))
    how = data.draw(st.sampled_from(["left", "not ready", "unproved"]))
    if how == "left":
        rest = [w for w in fleet if w.worker_id != gone]
    elif how == "not ready":
        rest = [replace(w, ready=w.worker_id != gone) for w in fleet]
    else:  # a prefill worker that nobody has proved, or a decode worker that has proved nobody
        known = frozenset(w.worker_id for w in fleet if w.role is Role.PREFILL and w.worker_id != gone)
        rest = [
            replace(w, proved_peers=frozenset() if w.worker_id == gone else known) if w.role is Role.DECODE else w
            for w in fleet
        ]
    for key in keys:
        before, after = pair(fleet, "t", key), pair(rest, "t", key)
        assert gone not in after
        # The other half of the pair stays too: with prefill its cache.
        assert all(was == now for was, now in zip(before, after, strict=True) if was != gone)


@given(keys, st.lists(st.integers(0, 4), min_size=6, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_an_affinity_never_overrides_limits_or_readiness(keys, loads, ready):
    fleet = [
        replace(w, outstanding_requests=load, ready=on)
        for w, load, on in zip(free_fleet(3, 3), loads, ready, strict=True)
    ]
    for key in keys:
        try:
            plain = route(fleet)
        except (Unavailable, NoCapacity) as error:
            with pytest.raises(type(error)):
                route(fleet, affinity=affinity_of("t", key))
            continue
        chosen = route(fleet, affinity=affinity_of("t", key))
        assert all(w.ready and has_room(w) for w in (chosen.decode, chosen.prefill))
        wished = route([replace(w, outstanding_requests=0) for w in fleet], affinity=affinity_of("t", key))
        names = [w.worker_id for w in (wished.decode, wished.prefill)]
        room = all(has_room(w) for w in fleet if w.worker_id in names)
        expected = names if room else [plain.decode.worker_id, plain.prefill.worker_id]
        assert [chosen.decode.worker_id, chosen.prefill.worker_id] == expected


def test_keys_spread_and_those_of_tenants_do_not_meet():
    fleet = free_fleet(4, 4)
    ours = [pair(fleet, "acme", f"s{i}") for i in range(200)]
    assert len(set(ours)) == 16
    assert ours != [pair(fleet, "other", f"s{i}") for i in range(200)]
    assert affinity_of("ab", "c") != affinity_of("a", "bc")


def test_answers_of_one_affinity_stay_together_while_there_is_room():
    fleet = [replace(w, request_limit=9) if w.role is Role.PREFILL else w for w in free_fleet(3, 2)]
    routes = route_many(fleet, tokens=10, count=5, affinity=affinity_of("t", "k"))
    names = [chosen.decode.worker_id for chosen in routes]
    assert (len(set(names[:4])), names[4] != names[0]) == (1, True)


# --- pairs ---------------------------------------------------------------------------------------------------------


def test_only_a_proved_pair_is_routed_over():
    cheap, dear = worker("a"), worker("b", outstanding_tokens=99)
    p0, p1 = worker("p0", Role.PREFILL), worker("p1", Role.PREFILL, outstanding_tokens=99)
    only_p1 = replace(cheap, proved_peers=frozenset({"p1"}))
    assert route([p0, p1, only_p1]).prefill.worker_id == "p1"
    nothing = replace(cheap, proved_peers=frozenset())
    chosen = route([p0, p1, nothing, replace(dear, proved_peers=frozenset({"p0", "p1"}))])
    assert (chosen.decode.worker_id, chosen.prefill.worker_id) == ("b", "p0")
    with pytest.raises(Unavailable) as caught:
        route([p0, p1, nothing])
    assert caught.value.reason == "no_proved_pair"


def test_a_proved_worker_that_is_full_is_waited_for():
    full = worker("p0", Role.PREFILL, outstanding_requests=4)
    with pytest.raises(NoCapacity) as caught:
        route([full, worker("p1", Role.PREFILL), worker("a", proved_peers=frozenset({"p0"}))], retry_after_ms=77)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("pairs_full", 77)


def proof(incarnation: int, *, passed: bool = True, reason: str = "") -> worker_pb2.PeerProof:
    return worker_pb2.PeerProof(worker_id="p0", incarnation=incarnation, passed=passed, reason=reason, detail=reason)


def fleet_of_a_pair(**decode: object) -> Fleet:
    fleet = fleet_of_one().added("p0", Role.PREFILL, "h:2")
    fleet = fleet.answered("p0", "h:2", status(worker_id="p0", role="prefill", incarnation=7))
    return fleet.answered("d0", "h:1", status(proves_peers=True, **decode))


def test_a_fleet_serves_when_a_pair_is_proved_for_the_present_life():
    fleet = fleet_of_a_pair()
    assert [(d.worker_id, p.worker_id) for d, p in unproved(fleet)] == [("d0", "p0")]
    assert not fleet.serving()
    assert not fleet.checked("d0", "h:1", proof(6)).serving(), "of an earlier life"
    assert not fleet.checked("d0", "h:9", proof(7)).serving(), "of another endpoint"
    passed = fleet.checked("d0", "h:1", proof(7))
    assert (passed.serving(), unproved(passed)) == (True, [])
    again = passed.answered("p0", "h:2", status(worker_id="p0", role="prefill", incarnation=8))
    assert (again.serving(), len(unproved(again))) == (False, 1)


def test_a_pair_that_fails_says_why():
    fleet = fleet_of_a_pair().checked("d0", "h:1", proof(7, passed=False, reason="digest_mismatch"))
    [(decode, failing)] = fleet.failing()
    assert (decode, failing.worker_id, failing.reason) == ("d0", "p0", "digest_mismatch")
    assert not fleet.serving()
    assert fleet.checked("d0", "h:1", proof(7)).failing() == ()
    assert fleet.removed("p0").failing() == ()


def test_workers_with_other_layouts_owe_no_exchange():
    """They never exchange pages; the router names the layout instead."""
    fleet = fleet_of_a_pair(layout_fingerprint="1")
    other = status(worker_id="p0", role="prefill", incarnation=7, layout_fingerprint="2")
    fleet = fleet.answered("p0", "h:2", other)
    assert (unproved(fleet), fleet.serving()) == ([], True)
    with pytest.raises(Unavailable) as caught:
        route(fleet.view({}))
    assert caught.value.reason == "no_matching_layout"


def test_a_worker_that_pulls_from_nobody_owes_no_exchange():
    fleet = fleet_of_one().added("p0", Role.PREFILL, "h:2").answered("d0", "h:1", status())
    assert fleet.answered("p0", "h:2", status(worker_id="p0", role="prefill", incarnation=7)).serving()
