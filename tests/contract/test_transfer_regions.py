"""A pool's memory is registered once and deregistered once, however its life ends; an old region is nobody's door."""

from __future__ import annotations

import collections
import gc
import os
import pathlib
from dataclasses import replace

import numpy as np
import pytest

from kvstore.beacon import BEACON_SLOTS, light_beacon
from kvstore.digest import Digester
from kvstore.errors import GenlockError
from kvstore.guard import Guard
from kvstore.transfer import mooncake, nixl_agent
from kvstore.transfer.base import PagePair, PoolExport, TransferEngine, TransferState
from tests.contract.transfer_kit import INCARNATION, KINDS, TIMEOUT_MS, Kit, require
from tests.support.kv_world import LAYOUT, SECRET, make_keyer

LIVES = 50
SLOTS = 6


class Broken(Exception):
    """What the injected failures raise: nothing of ours expects it."""


class Regions:
    """Counts what is registered with each kind's library, and breaks its calls on request."""

    def __init__(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: collections.Counter[str] = collections.Counter()
        self.fail_register = self.fail_after_register = False
        self._kit = kit
        if kit.kind == "mooncake":
            self._watch_mooncake(monkeypatch)
        elif kit.kind.startswith("nixl"):
            self._watch_nixl(monkeypatch)

    def count(self) -> int:
        """Regions that the library or, where there is no registration, the host still knows."""
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        memfds = sum("memfd:genlock-pool" in name for name in names)
        mapped = pathlib.Path("/proc/self/maps").read_text().count("memfd:genlock-pool")
        return memfds + mapped + self._kit.fabric.pools + sum(self.open.values())

    def _before(self) -> None:
        if self.fail_register:
            raise Broken

    def _after(self) -> None:
        if self.fail_after_register:
            raise Broken

    def _watch_mooncake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, regions = mooncake.load_library(), self

        class Counting:
            """The library's engine; what is registered when it is destroyed is gone with it."""

            def __init__(self) -> None:
                self._library = real()
                self._mine: set[int] = set()

            def register_memory(self, address: int, size: int) -> int:
                regions._before()
                code = self._library.register_memory(address, size)
                if code == 0:
                    self._mine.add(address)
                    regions.open["region"] += 1
                regions._after()
                return code

            def unregister_memory(self, address: int) -> int:
                if address not in self._mine:  # the library would complain; nothing was registered here
                    return -1
                code = self._library.unregister_memory(address)
                assert code == 0
                self._mine.remove(address)
                regions.open["region"] -= 1
                return code

            def __getattr__(self, name: str):
                return getattr(self._library, name)

        monkeypatch.setattr(mooncake, "load_library", lambda: Counting)

    def _watch_nixl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        regions, real = self, nixl_agent.load_library()

        class Counting:
            def __init__(self, *args: object) -> None:
                self._agent = real.nixlAgent(*args)

            def registerMem(self, listed, backends):
                regions._before()
                self._agent.registerMem(listed, backends)
                regions.open["region"] += 1
                regions._after()
                return True

            def deregisterMem(self, listed, backends):
                self._agent.deregisterMem(listed, backends)  # raises for what is not registered
                regions.open["region"] -= 1

            def __getattr__(self, name: str):
                return getattr(self._agent, name)

        class Library:
            def __getattr__(self, name: str):
                return Counting if name == "nixlAgent" else getattr(real, name)

        library = Library()
        library.__dict__.update({k: v for k, v in vars(real).items() if k != "nixlAgent"})
        monkeypatch.setattr(nixl_agent, "load_library", lambda: library)


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.fixture(params=KINDS)
def kit(request: pytest.FixtureRequest):
    require(request.param)
    kit = Kit(request.param)
    yield kit
    kit.close()


STEPS = ("allocate", "register", "after_register", "beacon", "connect", "read", "nothing")


def live(kit: Kit, regions: Regions, source: PoolExport, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's pool from its making to its end, with a failure at one step; the owner closes what it has made."""
    engine = kit.engine()
    try:
        with monkeypatch.context() as patch:
            regions.fail_register = step == "register"
            regions.fail_after_register = step == "after_register"
            if step == "allocate":
                patch.setattr(engine, "_map" if hasattr(engine, "_map") else "allocate", _break)
            guard = Guard(LAYOUT, SLOTS, engine, INCARNATION, Digester(SECRET, LAYOUT.slot_bytes), spares=BEACON_SLOTS)
            if step == "beacon":
                patch.setattr(guard, "seal", _break)
            light_beacon(guard, make_keyer())
            if step == "connect":
                source = replace(source, incarnation=source.incarnation + 1)
            peer = engine.connect(source)
            if step == "read":
                engine.disconnect(peer)
            engine.read_pages(peer, [PagePair(0, 0)]).wait(TIMEOUT_MS)
            engine.read_tags(peer, TIMEOUT_MS)
    except (Broken, GenlockError):
        if step == "nothing":
            raise
    else:
        assert step in ("nothing", "register", "after_register"), f"{step} did not fail"
    finally:
        regions.fail_register = regions.fail_after_register = False
        engine.close()
        kit.made.remove(engine)


def _break(*_: object, **__: object) -> None:
    raise Broken


def test_fifty_lives_that_break_at_every_step_leave_nothing_registered(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = Regions(kit, monkeypatch)
    source = kit.pool(SLOTS, LAYOUT.slot_bytes, incarnation=INCARNATION + 1)
    before = regions.count()
    gc.freeze()  # collections below look at the few objects of one life only
    try:
        for life in range(LIVES):
            live(kit, regions, source.export, STEPS[life % len(STEPS)], monkeypatch)
            if regions.count() != before:
                gc.collect()  # a guard and its book know each other, and a mapping goes with its last array
            assert regions.count() == before, f"after a life that broke at {STEPS[life % len(STEPS)]!r}"
    finally:
        gc.unfreeze()


def test_a_descriptor_of_an_old_region_is_refused_though_its_address_is_the_same(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pool lives where the first one lived; who holds the first one's export gets nothing of it."""
    first_map: list[np.ndarray] = []

    def same_place(engine: TransferEngine) -> None:
        """The engine's next pool takes over the memory of the first."""
        inner = getattr(engine, "inner", engine)
        real = inner._map
        if kit.kind in ("mooncake", "memory"):

            def again(nbytes: int) -> np.ndarray:
                if not first_map:
                    first_map.append(real(nbytes))
                first_map[0][:] = 0
                return first_map[0]

            monkeypatch.setattr(inner, "_map", again)

    reader = kit.pool(SLOTS, 192, seed=1, incarnation=INCARNATION + 5)
    old = kit.engine("same")
    same_place(old)
    buffer = old.allocate(SLOTS, 192)
    export, address = old.publish(INCARNATION, "layout"), buffer.ctypes.data
    peer = reader.engine.connect(export)
    assert reader.engine.read_pages(peer, [PagePair(0, 0)]).wait(TIMEOUT_MS) is TransferState.DONE
    del buffer
    old.close()
    kit.made.remove(old)
    del old
    gc.collect()
    new = kit.engine("same")
    same_place(new)
    buffer = new.allocate(SLOTS, 192)
    new.publish(INCARNATION + 1, "layout")
    if kit.kind in ("mooncake", "memory"):
        assert buffer.ctypes.data == address
    try:
        live_S2 = reader.engine.read_tags(peer, TIMEOUT_MS)
    except GenlockError:
        pass
    else:  # an engine that reads on tells of another life in every row, and the receipt refuses each page
        assert not (live_S2[:, 0] == INCARNATION).any()
    with pytest.raises(GenlockError):
        reader.engine.connect(export)


def test_an_engine_tells_how_many_regions_it_holds(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's own, and one for each connection; those that were refused or have ended do not count."""
    watched = Regions(kit, monkeypatch)
    one, other = (kit.pool(SLOTS, 192, incarnation=INCARNATION + n) for n in (1, 2))
    theirs = watched.open["region"]
    reader = kit.pool(SLOTS, 192)

    def told(regions: int) -> None:
        assert reader.engine.regions() == regions
        if kit.kind.startswith("nixl"):
            assert watched.open["region"] - theirs == regions, "what the library knows"

    told(1)
    peers = [reader.engine.connect(pool.export) for pool in (one, other, other)]
    told(4)
    with pytest.raises(GenlockError):
        reader.engine.connect(replace(one.export, incarnation=INCARNATION + 3))
    told(4)
    reader.engine.disconnect(peers[2])
    reader.engine.disconnect(peers[2])
    told(3)
    for peer in peers[:2]:
        reader.engine.disconnect(peer)
    told(1)
    reader.engine.close()
    told(0)
