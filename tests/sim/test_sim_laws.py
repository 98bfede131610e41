"""Every law can go red: each one is broken on purpose in a world without faults, and must be the verdict.

A checker that never fires is the worst fault of a simulator; `test_a_dead_checker_is_noticed` shows that these tests
see one.
"""

import pytest

from kvstore.checks import ALL_CHECKS
from sim import audit
from sim.faults import NO_FAULTS
from sim.laws import LAWS
from sim.worker import TICK_MS
from sim.world import HEAVY_EVERY, World, audited_every, make_kit
from tests.sim.sabotage import ALSO, AT_ONCE, SABOTAGE, lose_page, running

KIT = make_kit()
SEED = 6


def world() -> World:
    return World(SEED, KIT, NO_FAULTS, ALL_CHECKS, heavy_every=1)


def until(w, ready, act):
    """Runs `act(w)` as an event of its own as soon as `ready(w)` holds."""

    def look():
        if ready(w):
            act(w)
        else:
            w.heap.after(1, "look", look)

    w.heap.after(0, "look", look)


def verdict(law: str) -> str | None:
    return verdict_of(*SABOTAGE[law])


def verdict_of(ready, act) -> str | None:
    w = world()
    until(w, ready, act)
    found = w.run()
    return found[0].law if found else None


def test_the_seed_is_clean():
    assert world().run() == []


def test_every_law_is_tried():
    assert SABOTAGE.keys() == LAWS.keys()


@pytest.mark.parametrize("law", LAWS)
def test_law_goes_red(law, monkeypatch):
    monkeypatch.setattr("sim.world.LIMIT_MS", 4_000)  # less than the longest request: nothing is overdue before it
    assert verdict(law) == law


@pytest.mark.parametrize(("law", "ready", "act"), ALSO, ids=lambda part: getattr(part, "__name__", part))
def test_law_goes_red_by_its_other_sides(law, ready, act):
    assert verdict_of(ready, act) == law


@pytest.mark.parametrize(("act", "told"), AT_ONCE, ids=lambda part: getattr(part, "__name__", ""))
def test_an_owner_too_many_is_noticed_at_once(act, told):
    w, at = world(), []
    until(w, running, lambda w: (act(w), at.append(w.heap.now_ms)))
    [found] = w.run()
    assert (found.law, found.at_ms) == ("two_owners", at[0])
    assert told in found.detail


def test_a_dead_checker_is_noticed(monkeypatch):
    monkeypatch.setattr(audit, "light", lambda w: None)
    monkeypatch.setattr(audit, "_states", lambda w, worker: None)
    assert verdict("page_lost") != "page_lost"


def test_a_page_lost_in_a_tick_is_noticed_at_once():
    w = World(SEED, KIT, NO_FAULTS, ALL_CHECKS, heavy_every=1 << 30)
    worker = w.decodes[0]
    tick = worker.tick

    def lossy():
        tick()
        lose_page(w)

    worker.tick = lossy
    [found] = w.run()
    assert (found.law, found.at_ms) == ("page_lost", TICK_MS)


def test_some_seeds_are_audited_after_every_event():
    every = [audited_every(seed) for seed in range(500)]
    assert set(every) == {1, HEAVY_EVERY}
    assert 25 < every.count(1) < 80
