"""Pairs that owe an exchange: the same as compared from nothing, and no more work than there is news."""

from __future__ import annotations

import random

import pytest

from cluster.gateway.fleet import Fleet, Load, layout_of
from cluster.gateway.pairs import Pairs, unproved
from cluster.roles import Role
from genlock.v1 import worker_pb2
from kvstore.errors import Unavailable

SIDE = 12
LOAD = Load()


def name(role: Role, number: int) -> str:
    return f"{role.value}-{number}"


def answered(fleet: Fleet, role: Role, number: int, passed: dict[str, int] | None = None, **fields: object) -> Fleet:
    """A new answer of a worker, as a gateway hears it: no object of the former one is in it."""
    worker_id = name(role, number)
    proofs = [worker_pb2.PeerProof(worker_id=k, incarnation=v, passed=True) for k, v in (passed or {}).items()]
    status = worker_pb2.WorkerStatus(
        worker_id=worker_id, role=role.value, proves_peers=role is Role.DECODE, peers=proofs, **fields
    )
    return fleet.answered(worker_id, f"{worker_id}:1", status)


def full_fleet(proved: bool = True) -> Fleet:
    fleet = Fleet()
    passed = {name(Role.PREFILL, number): 7 for number in range(SIDE)} if proved else {}
    for role in Role:
        for number in range(SIDE):
            fleet = fleet.added(name(role, number), role, f"{name(role, number)}:1")
            fleet = answered(fleet, role, number, passed if role is Role.DECODE else None, incarnation=7)
    return fleet


def names(records) -> set[tuple[str, str]]:
    return {(decode.worker_id, prefill.worker_id) for decode, prefill in records}


def test_answers_without_news_cost_no_comparison():
    fleet, pairs = full_fleet(), Pairs()
    pairs.look(fleet)
    assert pairs.compared == SIDE * SIDE
    passed = {name(Role.PREFILL, number): 7 for number in range(SIDE)}
    for role in Role:
        for number in range(SIDE):
            fleet = answered(fleet, role, number, passed if role is Role.DECODE else None, incarnation=7, steps=99)
    pairs.look(fleet)
    assert pairs.compared == SIDE * SIDE
    assert not names(pairs.owed())


@pytest.mark.parametrize(
    ("news", "owed"),
    [
        (lambda fleet: answered(fleet, Role.PREFILL, 3, incarnation=8), SIDE),
        (lambda fleet: answered(fleet, Role.DECODE, 3, {"prefill-0": 7}, incarnation=9), SIDE - 1),
        (lambda fleet: fleet.failed("prefill-3", "prefill-3:1", Unavailable("gone")), 0),
        (lambda fleet: fleet.added("prefill-99", Role.PREFILL, "x:1"), 0),
    ],
)
def test_one_workers_news_cost_its_own_pairs(news, owed: int):
    fleet, pairs = full_fleet(), Pairs()
    pairs.look(fleet)
    before = pairs.compared
    fleet = news(fleet)
    pairs.look(fleet)
    assert pairs.compared - before <= SIDE
    assert len(list(pairs.owed())) == owed
    assert names(pairs.owed()) == names(unproved(fleet))


def test_a_pair_is_owed_for_one_life():
    fleet, pairs = full_fleet(), Pairs()
    pairs.look(answered(fleet, Role.PREFILL, 0, incarnation=8))
    assert pairs.owes("decode-0", "prefill-0", 8)
    assert not pairs.owes("decode-0", "prefill-0", 7)
    assert not pairs.owes("decode-0", "prefill-1", 7)
    assert not pairs.owes("nobody", "prefill-0", 8)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_what_a_fresh_look_finds(seed: int):
    rng = random.Random(seed)
    fleet, pairs = Fleet(), Pairs()
    for _ in range(150):
        role, number = rng.choice(list(Role)), rng.randrange(4)
        worker_id = name(role, number)
        kind = rng.randrange(6)
        if kind == 0:
            fleet = fleet.removed(worker_id)
        elif kind == 1:
            fleet = fleet.added(worker_id, role, f"{worker_id}:1")
        elif kind == 2:
            fleet = fleet.failed(worker_id, f"{worker_id}:1", Unavailable("gone"))
        elif kind == 3 and rng.random() < 0.3:
            fleet = Fleet(fleet.policy, fleet.workers, frozenset({worker_id} if rng.random() < 0.5 else ()))
        elif kind == 4:
            proof = worker_pb2.PeerProof(
                worker_id=name(Role.PREFILL, rng.randrange(4)),
                incarnation=rng.randrange(1, 3),
                passed=rng.random() < 0.7,
            )
            fleet = fleet.checked(name(Role.DECODE, number), f"{name(Role.DECODE, number)}:1", proof)
        else:
            passed = {name(Role.PREFILL, n): rng.randrange(1, 3) for n in range(4) if rng.random() < 0.5}
            layout = rng.choice(("", "1", "1", "2"))
            fleet = answered(fleet, role, number, passed, incarnation=rng.randrange(1, 3), layout_fingerprint=layout)
        if rng.random() < 0.5:
            pairs.look(fleet)
            assert names(pairs.owed()) == names(unproved(fleet))
            for decode, prefill in pairs.owed():
                assert prefill.worker_id not in (fleet._view(decode, LOAD).proved_peers or ())


@pytest.mark.parametrize("proved", [True, False])
def test_whether_a_fleet_serves_is_asked_of_workers_and_not_of_pairs(monkeypatch: pytest.MonkeyPatch, proved: bool):
    asked = []
    monkeypatch.setattr("cluster.gateway.fleet.layout_of", lambda record: asked.append(record) or layout_of(record))
    assert full_fleet(proved).serving() is proved
    assert len(asked) <= 4 * SIDE
