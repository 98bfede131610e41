"""The controller over an emulated Kubernetes API: what it reads and patches there, and what it does while it fails."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from dataclasses import replace

import pytest

from cluster import devca
from cluster.control.api import Change
from cluster.control.controller import Controller
from cluster.control.hands import Need, OnLost, Place
from cluster.control.operations import Operations
from cluster.control.state import Phase
from cluster.kube.client import KubeClient
from cluster.kube.room import KubeRoom
from cluster.roles import Role
from cluster.settings import KubeConfig
from kvstore.errors import Conflict, DeadlineExceeded, InvalidInput, NoCapacity, NotFound, PermissionDenied, Unavailable
from tests.support.control_world import POLICY, TIMES, FakeFleet, World
from tests.support.kube_api import KubeApi, group

ME = Change("me", "because")
# Slow machines end no drain and no start early.
PATIENT = replace(POLICY, drain_ms=20_000, start_ms=20_000)
D, P = Role.DECODE, Role.PREFILL


@contextlib.asynccontextmanager
async def api(tmp_path, decode: int = 2, **more):
    async with KubeApi(group("prefill", 1), group("decode", decode, **more), account=tmp_path / "account") as served:
        yield served


def settings_for(served: KubeApi, **more) -> KubeConfig:
    return KubeConfig(
        enabled=True, server=served.url, account_folder=str(served.account), timeout_ms=2000, sync_ms=100, **more
    )


class PodFleet(FakeFleet):
    """Workers that start where there is a free pod of their role, and wait for one as Ray does."""

    def __init__(self, served: KubeApi, place_s: float = 0.3) -> None:
        super().__init__()
        self.served = served
        self.place_s = place_s
        self.on: dict[str, str] = {}
        served.busy = lambda: set(self.on.values())

    async def start(self, worker_id: str, role: Role, on_lost: OnLost, avoid: frozenset[str] = frozenset()) -> Place:
        deadline = asyncio.get_running_loop().time() + self.place_s
        while not (free := [pod for pod in self.served.of(role.value) if pod not in self.on.values()]):
            if asyncio.get_running_loop().time() > deadline:
                raise NoCapacity("no_place", f"{worker_id} demands a pod, 0 are free")
            await asyncio.sleep(0.01)
        place = await super().start(worker_id, role, on_lost)
        self.on[worker_id] = free[0]
        return replace(place, node=free[0])

    async def check_room(self, counts: dict[Role, int], avoid: frozenset[str] = frozenset()) -> None:
        for role, count in counts.items():
            if count > len(self.served.of(role.value)):
                raise NoCapacity("no_place", f"{count} {role.value} workers")

    async def _end(self, what: str, worker_id: str) -> None:
        await super()._end(what, worker_id)
        self.on.pop(worker_id, None)


class PodWorld(World):
    def __init__(self, fleet: PodFleet, seed: tuple[int, int] = (1, 2), registry=None) -> None:
        super().__init__(fleet, registry, seed)
        old = self.controller
        times = replace(TIMES, room_ms=100)
        room = KubeRoom(settings_for(fleet.served))
        self.controller = Controller(PATIENT, times, self.registry, fleet, fleet, old.clocks, seed, room)
        self.operations = Operations(self.controller)

    async def when(self, true, what: str) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.01)

    async def told(self, words: str) -> bool:
        events = await self.operations.events(limit=1000)
        return any(words in event.message for event in events if event.kind == "nodes")


# --- the fleet ------------------------------------------------------------------------------------------------------


async def test_scale_up_raises_replicas_and_the_worker_starts_on_the_new_pod(tmp_path):
    async with api(tmp_path) as served, PodWorld(PodFleet(served, place_s=5)) as world:
        await world.settled()
        assert served.patches == []
        await world.operations.scale(None, 3, ME)
        await world.settled()
        assert (served.replicas("decode"), served.replicas("prefill")) == (3, 1)
        assert len(served.patches) == 1
        assert sorted(set(world.fleet.on.values())) == sorted(served.pods)
        await world.until(lambda _s: not world.controller._events, "events")
        assert await world.told("decode replicas 2 to 3")


async def test_scale_down_drains_then_names_exactly_the_drained_pod(tmp_path):
    async with api(tmp_path, 3) as served, PodWorld(PodFleet(served), (1, 3)) as world:
        await world.settled()
        # The busy ones stay, whichever pods they are on.
        for worker_id in ("decode-1", "decode-2"):
            world.fleet.workers[worker_id].running_requests = 3
        await world.until(lambda s: s.rows["decode-1"].load == s.rows["decode-2"].load == 3, "loads")
        gone = world.fleet.on["decode-0"]
        world.fleet.workers["decode-0"].running_requests = 1
        await world.operations.scale(None, 2, ME)
        await world.until(lambda s: s.rows["decode-0"].phase is Phase.DRAINING, "the drain")
        await asyncio.sleep(0.3)
        assert (served.replicas("decode"), served.patches) == (3, [])
        world.fleet.workers["decode-0"].running_requests = 0
        await world.when(lambda: served.replicas("decode") == 2, "fewer replicas")
        assert [one["value"] for one in served.patches[0] if one["op"] == "add"] == [{"workersToDelete": [gone]}]
        assert (len(served.patches), served.chosen, gone in served.pods) == (1, [], False)
        assert world.fleet.done.index(("drain", "decode-0")) < world.fleet.done.index(("stop", "decode-0"))
        assert set(world.fleet.on) == {"prefill-0", "decode-1", "decode-2"}
        await world.settled()


async def test_a_controller_that_died_before_its_patch_gives_the_pod_back_in_its_next_life(tmp_path):
    async with api(tmp_path, 3) as served:
        fleet = PodFleet(served)
        async with PodWorld(fleet, (1, 3)) as world:
            await world.settled()
            served.before = lambda _request: (503, "down")
            await world.operations.scale(None, 2, ME)
            await world.until(lambda s: len(s.of(D)) == 2, "one worker less")
            registry = world.registry
        assert served.patches == []
        served.before = None
        fleet.adopt = adopted_on_pods(fleet)  # type: ignore[method-assign]
        async with PodWorld(fleet, (1, 1), registry) as world:
            await world.when(lambda: served.replicas("decode") == 2, "fewer replicas")
            assert served.chosen == []
            assert set(fleet.on.values()) == set(served.pods)


def adopted_on_pods(fleet: PodFleet):
    async def adopt(on_lost: OnLost):
        return [replace(one, node=fleet.on[one.worker_id]) for one in await FakeFleet.adopt(fleet, on_lost)]

    return adopt


async def test_replicas_above_what_the_bounds_allow_are_refused_by_name(tmp_path):
    async with api(tmp_path, 2, high=3) as served, PodWorld(PodFleet(served)) as world:
        await world.settled()
        with pytest.raises(NoCapacity, match="maxReplicas are 3") as raised:
            await world.operations.scale(None, 4, ME)
        assert raised.value.reason == "above_max_replicas"
        assert (served.patches, (await world.operations.view()).desired.decode) == ([], 2)


@pytest.mark.parametrize("fault", ["down", "hangs", "list hangs"])
async def test_while_the_api_fails_replicas_stay_and_the_fleet_goes_on(tmp_path, fault):
    async with api(tmp_path, 3) as served, PodWorld(PodFleet(served), (1, 3)) as world:
        await world.settled()
        stuck = asyncio.Event()

        async def before(request):
            if fault == "down":
                return 503, "etcd leader changed"
            if fault == "hangs" or request.path.endswith("/pods"):
                await stuck.wait()
            return None

        served.before = before
        world.controller.keeper.room._client._settings = replace(settings_for(served), timeout_ms=100)
        await world.operations.scale(None, 2, ME)
        await world.until(lambda s: len(s.of(D)) == 2, "the drained worker's end")
        # A neighbour that dies comes back: its pod is there.
        survivor = next(row.worker_id for row in world.controller.state.of(D))
        life = world.controller.state.rows[survivor].life
        world.fleet.on.pop(survivor)
        world.fleet.die(survivor)
        await world.until(
            lambda s: s.rows[survivor].life > life and s.rows[survivor].phase is Phase.READY, "its next life"
        )
        reason = "kube_unreachable" if fault == "down" else "kube_timeout"
        await world.when(lambda: reason in world.controller.room_error, "the error")
        assert (served.replicas("decode"), served.patches, len(served.of("decode"))) == (3, [], 3)
        assert reason in (await world.operations.view()).reason
        served.before = None
        stuck.set()
        await world.when(lambda: served.replicas("decode") == 2, "fewer replicas")
        assert (served.chosen, len(served.patches)) == ([], 1)
        await world.settled()


async def test_a_denied_patch_is_an_event_and_the_reason_of_the_worker_that_waits(tmp_path):
    async with api(tmp_path) as served, PodWorld(PodFleet(served)) as world:
        await world.settled()
        served.before = lambda request: (403, "cannot patch rayclusters") if request.method == "PATCH" else None
        await world.operations.scale(None, 3, ME)

        def told_of(phase: str, words: str):
            return lambda _state: any(
                row.worker_id == "decode-2" and row.phase == phase and words in row.reason
                for row in world.operations._view().workers
            )

        await world.until(told_of("STARTING", "cannot patch rayclusters"), "its reason while it waits")
        await world.until(told_of("STOPPED", "0 are free; kube_denied"), "demand and supply")
        await world.until(lambda _s: not world.controller._events, "events")
        assert await world.told("kube_denied")
        assert served.replicas("decode") == 2
        assert {row.phase for row in world.operations._view().workers if row.worker_id != "decode-2"} == {"READY"}
        served.before = None
        await world.settled()
        assert served.replicas("decode") == 3


async def test_a_later_life_of_the_controller_alone_decides_about_pods(tmp_path):
    async with api(tmp_path, 3) as served, PodWorld(PodFleet(served), (1, 3)) as world:
        await world.settled()
        world.controller.superseded = True
        del world.fleet.on["decode-2"]
        world.controller.state = replace(
            world.controller.state, rows={}, desired=replace(world.controller.state.desired, decode=1)
        )
        await asyncio.sleep(0.5)
        assert served.patches == []


# --- one look -------------------------------------------------------------------------------------------------------


def looking(wanted: int, *pods: str):
    async def look():
        return {P: Need(1, False, ()), D: Need(wanted, False, tuple(frozenset({pod}) for pod in pods))}

    return look


@contextlib.asynccontextmanager
async def room_of(served: KubeApi, **more):
    room = KubeRoom(settings_for(served, **more))
    try:
        yield room
    finally:
        await room.close()


async def test_replicas_that_somebody_else_changed_meanwhile_are_read_again(tmp_path):
    async with api(tmp_path, 3) as served, room_of(served) as room:
        first, second, third = served.of("decode")
        seen = []

        def before(request):
            seen.append(request.method)
            if request.method == "PATCH" and seen.count("PATCH") == 1:  # after it was read
                served.group("decode")["replicas"] = 4
                served.settle()

        served.before = before
        changes = await room.fit(looking(2, first, second))
        assert seen == ["GET", "GET", "PATCH", "GET", "GET", "PATCH"]
        assert served.replicas("decode") == 2
        assert sorted(served.of("decode")) == sorted([first, second])
        assert third in changes[0]
        assert served.chosen == []


async def test_groups_in_another_order_are_found_by_name(tmp_path):
    async with api(tmp_path, 3) as served, room_of(served) as room:

        def before(request):
            if request.method == "PATCH" and not served.patches:
                served.cluster["spec"]["workerGroupSpecs"].sort(key=lambda one: one["groupName"])

        served.before = before
        await room.fit(looking(4))
        assert (served.replicas("decode"), served.replicas("prefill")) == (4, 1)


async def test_who_is_slower_under_every_try_gives_up_with_a_conflict(tmp_path):
    async with api(tmp_path, 3) as served, room_of(served) as room:
        served.before = lambda request: (409, "the object has been modified") if request.method == "PATCH" else None
        with pytest.raises(Conflict, match="has been modified"):
            await room.fit(looking(4))
        assert served.replicas("decode") == 3


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [((403, "no"), PermissionDenied, "kube_denied"), ((404, "no"), NotFound, "kube_not_found"),
     ((500, "no"), Unavailable, "kube_unreachable")],
)  # fmt: skip
async def test_refusals_are_typed_and_change_nothing(tmp_path, answer, kind, reason):
    async with api(tmp_path) as served, room_of(served) as room:
        served.before = lambda _request: answer
        for call in (room.fit(looking(4)), room.check({D: 1})):
            with pytest.raises(kind) as raised:
                await call
            assert raised.value.reason == reason
        assert served.patches == []


async def test_a_server_that_is_away_or_silent_is_typed(tmp_path):
    async with api(tmp_path) as served:
        stuck = asyncio.Event()
        served.before = lambda _request: stuck.wait()
        async with room_of(served) as room:
            room._client._settings = replace(settings_for(served), timeout_ms=50)
            with pytest.raises(DeadlineExceeded, match="does not answer"):
                await room.fit(looking(4))
        stuck.set()
    async with room_of(served) as room:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await room.check({D: 1})


async def test_the_token_is_read_anew_when_it_rotates(tmp_path):
    async with api(tmp_path) as served:
        client = KubeClient(settings_for(served))
        await client.cluster()
        served.token = "rotated"
        with pytest.raises(PermissionDenied):
            await client.cluster()
        (served.account / "token").write_text("rotated")
        assert (await client.cluster())["metadata"]["name"] == "genlock"
        await client.close()


async def test_the_server_must_show_a_certificate_of_the_accounts_ca(tmp_path):
    now = datetime.datetime.now(datetime.UTC)
    ours, other = devca.make(tmp_path / "ours", [], now), devca.make(tmp_path / "other", [], now)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(ours.cert, ours.key)
    account = tmp_path / "account"
    async with KubeApi(group("prefill", 1), group("decode", 2), account=account, tls=tls) as served:
        client = KubeClient(settings_for(served))
        (account / "ca.crt").write_bytes(other.ca.read_bytes())
        with pytest.raises(Unavailable, match="cannot be reached"):
            await client.cluster()
        # The kubelet replaces the file.
        (account / "ca.crt").write_bytes(ours.ca.read_bytes() + b"\n")
        assert (await client.cluster())["metadata"]["name"] == "genlock"
        (account / "ca.crt").unlink()
        for _again in range(2):
            with pytest.raises(InvalidInput, match=r"ca\.crt"):
                await client.cluster()
        await client.close()
