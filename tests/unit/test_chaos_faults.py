"""The saboteur does to its target what was planned, with the planned amount, and heals it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from cluster.chaos import faults
from cluster.chaos.faults import Saboteur
from cluster.chaos.plan import OF_WORKERS, Fault, PlannedFault
from cluster.chaos.worker import Switch

Done = tuple[object, ...]


class Board:
    def __init__(self, worker_id: str, done: list[Done]) -> None:
        self._worker_id, self._done = worker_id, done

    def set(self, switch: Switch, value: int) -> None:
        self._done.append(("set", self._worker_id, switch, value))


class Everything:
    """An arena, a link, a registry's server and its memory pressure: each writes down what is done to it."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    async def restart_gateway(self) -> None:
        self.done.append(("restart gateway",))

    def halt(self, worker_id: str) -> None:
        self.done.append(("halt", worker_id))

    def go_on(self, worker_id: str) -> None:
        self.done.append(("go on", worker_id))

    def board(self, worker_id: str) -> Board:
        return Board(worker_id, self.done)

    def pair_ports(self, decode_id: str, prefill_id: str) -> tuple[str, str]:
        return f"ports of {decode_id}", f"ports of {prefill_id}"

    @contextlib.asynccontextmanager
    async def fault(self, near_ports, far_ports, kbit_per_s):
        self.done.append(("link", near_ports, far_ports, kbit_per_s))
        yield
        self.done.append(("link is whole",))

    async def kill(self, worker_id: str, down_s: float, pages: int) -> None:
        self.done.append(("kill", worker_id, down_s, pages))

    async def squeeze(self, percent: int, seconds: float) -> None:
        self.done.append(("squeeze", percent, seconds))


class Server:
    def __init__(self, done: list[Done]) -> None:
        self._done = done

    def kill(self) -> None:
        self._done.append(("kill registry",))

    async def start(self) -> None:
        self._done.append(("start registry",))

    async def flush(self) -> None:
        self._done.append(("flush registry",))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited for, in no time."""
    seconds: list[float] = []

    async def sleep(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr(faults.asyncio, "sleep", sleep)
    return seconds


def saboteur_of(everything: Everything) -> Saboteur:
    made = Saboteur(everything, everything, Server(everything.done))  # type: ignore[arg-type] # what faults use of it
    made._pressure = everything  # type: ignore[assignment]
    return made


AT, FOR = 250, 1500
CARRIED_OUT: dict[Fault, tuple[list[Done], list[float]]] = {
    # what is done, and what is waited for between the fault's time and its healing
    Fault.KILL: ([("kill", "decode-1", 1.5, 40)], []),
    Fault.SMALL_POOL: ([("kill", "decode-1", 1.5, 40)], []),
    Fault.STOP: ([("halt", "decode-1"), ("go on", "decode-1")], [1.5]),
    Fault.CANCEL_STORM: ([], []),
    Fault.SLOW_READERS: ([], []),
    Fault.SAME_IDS: ([], []),
    Fault.DISK_FULL: (
        [("set", "decode-1", Switch.DISK_FULL, 40), ("set", "decode-1", Switch.DISK_FULL, 0)], [1.5]),
    Fault.CLOCK_JUMP: (
        [("set", "decode-1", Switch.CLOCK_SHIFT_MS, 40), ("set", "decode-1", Switch.CLOCK_SHIFT_MS, 0)], [1.5]),
    Fault.FOREIGN_PAGE: (
        [("set", "decode-1", Switch.FOREIGN_PAGES, 40), ("set", "decode-1", Switch.FOREIGN_PAGES, 0)], [1.5]),
    Fault.GATEWAY_RESTART: ([("restart gateway",)], []),
    Fault.REGISTRY_KILL: ([("kill registry",), ("start registry",)], [1.5]),
    Fault.REGISTRY_FLUSH: ([("flush registry",)], []),
    Fault.LINK_CUT: ([("link", "ports of decode-1", "ports of prefill-0", 40), ("link is whole",)], [1.5]),
    Fault.LINK_SLOW: ([("link", "ports of decode-1", "ports of prefill-0", 40), ("link is whole",)], [1.5]),
    Fault.MEMORY_PRESSURE: ([("squeeze", 40, 1.5)], []),
}  # fmt: skip


@pytest.mark.parametrize("kind", Fault)
async def test_each_kind_is_done_to_its_target_and_healed(kind: Fault, waits: list[float]) -> None:
    everything = Everything()
    saboteur = saboteur_of(everything)
    await saboteur.carry_out(PlannedFault(AT, kind, "decode-1", FOR, 40, peer="prefill-0"))
    done, waited = CARRIED_OUT[kind]
    assert everything.done == done
    assert waits == [0.25, *waited]
    assert saboteur.errors == []
    assert saboteur.done == {kind.value: 1}
    assert saboteur.kills == (kind in (Fault.KILL, Fault.SMALL_POOL))
    assert saboteur.broken == set()


async def test_a_switch_without_an_amount_is_turned_on(waits: list[float]) -> None:
    everything = Everything()
    await saboteur_of(everything).carry_out(PlannedFault(AT, Fault.DISK_FULL, "decode-1", FOR))
    assert [value for *_, value in everything.done] == [1, 0]


HEALED = {
    Fault.STOP: ("go on", "decode-1"),
    Fault.DISK_FULL: ("set", "decode-1", Switch.DISK_FULL, 0),
    Fault.CLOCK_JUMP: ("set", "decode-1", Switch.CLOCK_SHIFT_MS, 0),
    Fault.FOREIGN_PAGE: ("set", "decode-1", Switch.FOREIGN_PAGES, 0),
    Fault.REGISTRY_KILL: ("start registry",),
}


@pytest.mark.parametrize("kind", HEALED)
async def test_a_run_that_is_cut_short_leaves_nothing_broken(kind: Fault) -> None:
    everything = Everything()
    saboteur = saboteur_of(everything)
    task = asyncio.create_task(saboteur.carry_out(PlannedFault(0, kind, "decode-1", 60_000, 40)))
    while not everything.done:
        await asyncio.sleep(0)
    assert saboteur.broken == {"decode-1"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert everything.done[-1] == HEALED[kind]
    assert saboteur.broken == set()
    assert not saboteur.done


def test_whatever_holds_a_worker_is_healed() -> None:
    assert OF_WORKERS - HEALED.keys() == {Fault.KILL, Fault.SMALL_POOL}, "the arena heals these"


async def test_faults_of_the_registry_take_turns() -> None:
    """A flush in the middle of a kill found no server, and the run failed for it."""
    everything = Everything()
    saboteur = saboteur_of(everything)
    kill = PlannedFault(0, Fault.REGISTRY_KILL, "", 20)
    await asyncio.gather(
        *(saboteur.carry_out(fault) for fault in (kill, PlannedFault(5, Fault.REGISTRY_FLUSH, "", 0), kill))
    )
    assert saboteur.errors == []
    killed, started, flushed = ("kill registry",), ("start registry",), ("flush registry",)
    assert sorted(everything.done) == sorted([killed, started, killed, started, flushed])
    assert everything.done[0] == killed
    assert everything.done[1] == started, "nothing comes between a kill and the server's return"
