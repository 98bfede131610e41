"""What a gateway makes of the registry: pure decisions, and a watch whose registry fails."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest

from cluster.config import load
from cluster.gateway.fleet import Fleet, WorkerState
from cluster.gateway.watch import RegistryWatch, View, WatchHealth, follow
from cluster.launch.front import Front
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Desired, WorkerRecord
from cluster.roles import Role
from cluster.router import route
from genlock.v1 import worker_pb2
from kvstore.errors import DeadlineExceeded, InvalidInput, Unavailable
from tests.support.fake_workers import load_fake

PREFILL = WorkerRecord("prefill-0", Role.PREFILL, "h:1", 11, "aa")
DECODE = WorkerRecord("decode-0", Role.DECODE, "h:2", 22, "aa")
OTHER = WorkerRecord("decode-1", Role.DECODE, "h:3", 33, "aa")
ALL = (DECODE, OTHER, PREFILL)
GONE = Unavailable("connect", "connection refused")


def answering(fleet: Fleet, *records: WorkerRecord) -> Fleet:
    for record in records:
        status = worker_pb2.WorkerStatus(
            worker_id=record.worker_id, role=record.role.value, incarnation=record.incarnation, layout_fingerprint="aa"
        )
        fleet = fleet.answered(record.worker_id, record.endpoint, status)
    return fleet


def seen(*records: WorkerRecord, desired: Desired = Desired()) -> tuple[Fleet, View]:  # noqa: B008 # frozen
    done = follow(Fleet(), View(), records, desired)
    return answering(done.fleet, *records), done.view


def test_new_workers_come_in_and_are_routed_to_once_they_answer() -> None:
    done = follow(Fleet(), View(), ALL, Desired())
    assert sorted(done.fleet.workers) == ["decode-0", "decode-1", "prefill-0"]
    assert done.news
    assert not done.fleet.serving()
    assert answering(done.fleet, *ALL).serving()


def test_an_unchanged_registry_changes_nothing() -> None:
    fleet, view = seen(*ALL)
    done = follow(fleet, view, ALL, Desired())
    assert (done.fleet, done.view, done.left, done.news) == (fleet, view, (), False)


def test_a_moved_worker_is_taken_anew_and_its_old_endpoint_left() -> None:
    fleet, view = seen(*ALL)
    done = follow(fleet, view, (replace(DECODE, endpoint="h:9", incarnation=99), OTHER, PREFILL), Desired())
    moved = done.fleet.workers["decode-0"]
    assert (moved.endpoint, moved.state) == ("h:9", WorkerState.UNREACHABLE)
    assert done.left == ("h:2",)
    assert done.news


def test_a_new_life_at_the_same_endpoint_is_asked_at_once_and_keeps_its_place() -> None:
    fleet, view = seen(*ALL)
    done = follow(fleet, view, (replace(DECODE, incarnation=99), OTHER, PREFILL), Desired())
    assert done.fleet == fleet
    assert done.news
    assert done.left == ()


def test_an_endpoint_that_another_worker_took_over_is_not_left() -> None:
    fleet, view = seen(DECODE, PREFILL)
    done = follow(fleet, view, (replace(DECODE, endpoint="h:9"), replace(OTHER, endpoint="h:2"), PREFILL), Desired())
    assert done.left == ()


def test_a_record_that_ran_out_takes_no_worker_that_answers() -> None:
    fleet, view = seen(*ALL)
    done = follow(fleet, view, (), Desired())
    assert done.fleet == fleet
    assert done.left == ()
    assert not follow(done.fleet, done.view, ALL, Desired()).news, "the same lives are back"


def test_a_worker_that_does_not_answer_stays_as_long_as_it_is_registered() -> None:
    fleet, view = seen(*ALL)
    fleet = fleet.failed("decode-1", "h:3", GONE)
    assert "decode-1" in follow(fleet, view, ALL, Desired()).fleet.workers


def test_who_is_neither_registered_nor_answers_goes() -> None:
    fleet, view = seen(*ALL)
    fleet = fleet.failed("decode-1", "h:3", GONE)
    done = follow(fleet, view, (DECODE, PREFILL), Desired())
    assert sorted(done.fleet.workers) == ["decode-0", "prefill-0"]
    assert done.left == ("h:3",)


def test_one_late_answer_does_not_make_a_worker_gone() -> None:
    fleet, view = seen(*ALL)
    fleet = fleet.failed("decode-1", "h:3", DeadlineExceeded("late"))
    assert "decode-1" in follow(fleet, view, (), Desired()).fleet.workers


def test_a_worker_that_was_not_asked_yet_is_not_gone() -> None:
    done = follow(Fleet(), View(), ALL, Desired())
    assert sorted(follow(done.fleet, done.view, (), Desired()).fleet.workers) == sorted(done.fleet.workers)


def test_a_stalled_worker_is_not_gone_and_a_foreign_one_in_its_place_is() -> None:
    fleet, view = seen(*ALL)
    stalled = worker_pb2.WorkerStatus(worker_id="decode-1", role="decode", step_age_ms=1 << 30)
    fleet = fleet.answered("decode-1", "h:3", stalled)
    assert fleet.workers["decode-1"].state is WorkerState.UNREACHABLE
    assert "decode-1" in follow(fleet, view, (), Desired()).fleet.workers
    fleet = fleet.answered("decode-1", "h:3", worker_pb2.WorkerStatus(worker_id="decode-7", role="decode"))
    assert "decode-1" not in follow(fleet, view, (), Desired()).fleet.workers


def test_a_cordoned_worker_is_never_chosen_and_comes_back() -> None:
    fleet, view = seen(*ALL, desired=Desired(revision=5, cordoned=frozenset({"decode-0"})))
    for _ in range(3):
        chosen = route(fleet.view({})).decode.worker_id
        assert chosen == "decode-1"
    assert fleet.serving()
    done = follow(fleet, view, ALL, Desired(revision=6, cordoned=frozenset({"decode-0", "decode-1"})))
    assert not done.fleet.serving()
    with pytest.raises(Unavailable) as caught:
        route(done.fleet.view({}))
    assert caught.value.reason == "no_decode_worker"
    done = follow(done.fleet, done.view, ALL, Desired(revision=7))
    assert route(done.fleet.view({})).decode.worker_id == "decode-0"


def test_a_worker_that_comes_after_its_cordon_is_cordoned() -> None:
    fleet, view = seen(DECODE, PREFILL, desired=Desired(revision=5, cordoned=frozenset({"decode-1"})))
    done = follow(fleet, view, ALL, Desired(revision=5, cordoned=frozenset({"decode-1"})))
    fleet = answering(done.fleet, OTHER)
    assert {worker.worker_id for worker in fleet.view({}) if worker.ready} == {"decode-0", "prefill-0"}


def test_a_life_that_is_cordoned_by_its_node_is_not_chosen_and_the_next_one_is() -> None:
    lives = MappingProxyType({"decode-0": DECODE.incarnation})
    fleet, view = seen(*ALL, desired=Desired(revision=5, cordoned_lives=lives))
    assert fleet.cordoned == {"decode-0"}
    lost = follow(fleet, view, [OTHER, PREFILL], Desired(revision=5, cordoned_lives=lives))
    assert lost.fleet.cordoned == {"decode-0"}, "its record ran out, and it is the same life"
    again = replace(DECODE, incarnation=DECODE.incarnation + 1)
    after = follow(fleet, view, [again, OTHER, PREFILL], Desired(revision=5, cordoned_lives=lives))
    assert after.fleet.cordoned == set()


def test_a_record_may_say_itself_that_it_is_cordoned() -> None:
    fleet, _view = seen(replace(DECODE, cordoned=True), OTHER, PREFILL)
    assert route(fleet.view({})).decode.worker_id == "decode-1"


@pytest.mark.parametrize("revision", [0, 4])
def test_a_flush_or_a_lagging_replica_lifts_no_cordon(revision: int) -> None:
    fleet, view = seen(*ALL, desired=Desired(revision=5, cordoned=frozenset({"decode-0"})))
    done = follow(fleet, view, ALL, Desired(revision=revision))
    assert done.fleet.cordoned == {"decode-0"}
    assert follow(done.fleet, done.view, ALL, Desired(revision=6)).fleet.cordoned == frozenset()


def test_health_in_words() -> None:
    health = WatchHealth()
    assert health.words(0, 0) == "not read yet"
    assert health.failed(1000, "refused").words(13_000, 0) == "unreachable for 12 s: refused; there is no view yet"
    health = health.ok()
    assert health.words(0, 0) == "ok"
    assert health.words(0, 2) == "ok; 2 records could not be read"
    failing = health.failed(0, "a").failed(5000, "b")
    assert failing.words(7400, 0) == "unreachable for 7 s: b; serving with the last view"
    assert failing.ok().words(9000, 0) == "ok"


def test_a_fleet_sleeps_from_the_wish_for_nobody_until_a_request_can_be_served() -> None:
    fleet, view = seen(*ALL, desired=Desired(revision=3, prefill=1, decode=2))
    assert not view.asleep
    done = follow(fleet, view, ALL, Desired(revision=4))
    assert done.view.asleep
    done = follow(Fleet(), done.view, (), Desired())
    assert done.view.asleep, "flushed: nothing is known to be wanted"
    woken = Desired(revision=5, prefill=1, decode=1)
    done = follow(Fleet(), done.view, (PREFILL, DECODE), woken)
    assert done.view.asleep, "they are there and have not answered yet"
    done = follow(answering(done.fleet, PREFILL, DECODE), done.view, (PREFILL, DECODE), woken)
    assert not done.view.asleep
    assert not follow(Fleet(), done.view, (), woken).view.asleep, "workers that are lost are no sleep"


class Breaking(MemoryRegistry):
    error: Exception | None = None

    async def workers(self) -> tuple[WorkerRecord, ...]:
        if self.error is not None:
            raise self.error
        return await super().workers()


@pytest.mark.parametrize("error", [Unavailable("registry_unreachable", "no route"), RuntimeError("surprise")])
async def test_a_registry_that_fails_changes_nothing_but_the_health(error: Exception) -> None:
    now = [0.0]
    registry = Breaking(lambda: now[0])
    for record in ALL:
        await registry.put_worker(record, 1000)
    state = SimpleNamespace(
        fleet=Fleet(), sources=SimpleNamespace(now_ms=lambda: now[0], random_bytes=bytes), registry_health=None,
        look_again=lambda: None, retire_channel=lambda _endpoint: None, set_asleep=lambda _asleep: None,
        config=load().config, arrived=3, waiting=(), peer_endpoint="",
    )  # fmt: skip
    state.set_fleet = lambda fleet: setattr(state, "fleet", fleet)
    watch = RegistryWatch(state, registry, lambda: 50_000)
    await watch.look()
    assert state.registry_health() == "ok"
    fleet = state.fleet
    assert len(fleet.workers) == 3
    registry.error = error
    await watch.look()
    now[0] = 12_000
    await watch.look()
    assert state.fleet is fleet
    assert state.registry_health().startswith("unreachable for 12 s: ")
    assert str(error) in state.registry_health()
    registry.error = None
    await watch.look()
    assert state.registry_health() == "ok"
    await registry.replace_desired(Desired(prefill=1, decode=1, refills=1, refilled_ms=38_000), 0)
    await watch.look()
    assert state.registry_health() == "ok; refilled 12 s ago"
    assert [(record.arrived, record.waiting) for record in await registry.gateways()] == [(3, 0)]


async def test_a_registry_that_does_not_take_what_a_gateway_tells_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.registry.memory.MAX_GATEWAYS", 0)
    state = SimpleNamespace(
        fleet=Fleet(), sources=SimpleNamespace(now_ms=lambda: 0.0, random_bytes=bytes), config=load().config,
        arrived=3, waiting=(), peer_endpoint="", set_asleep=lambda _asleep: None,
    )  # fmt: skip
    watch = RegistryWatch(state, MemoryRegistry(lambda: 0.0), lambda: 50_000)
    await watch.look()
    assert state.registry_health() == (
        "ok; does not take what this gateway tells: 1024 gateways are registered already"
    )


def test_a_gateway_alone_needs_a_shared_registry() -> None:
    with pytest.raises(InvalidInput) as caught:
        Front(load().config, load_fake)
    assert caught.value.field == "registry.url"
