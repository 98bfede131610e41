"""One record says everything that may go wrong in a simulated run. A rate is the chance at each opportunity."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, fields, replace

ARMED_SHARE = 0.25  # chance that a site is armed in a seed
CALM_SHARE = 0.06  # chance that a seed has no fault at all
_RATES = (0.005, 0.02, 0.06)
# few opportunities in a run
_SELDOM = frozenset((
    "drain_lost", "start_fails", "end_unheard", "clock_skew", "client_repeat", "label_shared", "client_abort",
    "abort_twice", "abort_by_other", "abort_unknown", "abort_near_end", "assign_lost", "assign_late", "assign_twice",
    "assigned_leaves",
))  # fmt: skip
_SELDOM_RATES = (0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Faults:
    """0 is not armed. Sites are named by what happens, grouped by where it happens."""

    # one copy of pages
    slow_copy: float = 0.0
    copy_dropped: float = 0.0
    early_notice: float = 0.0
    late_bytes: float = 0.0
    error_rest_lands: float = 0.0
    connection_lost: float = 0.0
    short_page: float = 0.0
    torn_page: float = 0.0
    reverse_order: float = 0.0
    duplicate_page: float = 0.0
    swapped_pages: float = 0.0
    bit_flip: float = 0.0
    sent_twice: float = 0.0
    follow_restart: float = 0.0
    wrap_out_of_range: float = 0.0
    # prefill's stream to decode
    stream_slow: float = 0.0
    stream_cut: float = 0.0
    stream_error: float = 0.0
    event_lost: float = 0.0
    event_twice: float = 0.0
    events_reordered: float = 0.0
    event_crossed: float = 0.0
    completion_crossed: float = 0.0
    event_altered: float = 0.0
    foreign_page: float = 0.0
    # decode's commands to prefill
    call_lost: float = 0.0
    release_lost: float = 0.0
    release_twice: float = 0.0
    release_early: float = 0.0
    renew_lost: float = 0.0
    cancel_lost: float = 0.0
    cancel_twice: float = 0.0
    unknown_command: float = 0.0
    lease_expires: float = 0.0
    # callers
    client_cancel: float = 0.0
    client_repeat: float = 0.0
    label_shared: float = 0.0
    client_abort: float = 0.0
    abort_twice: float = 0.0
    abort_by_other: float = 0.0
    abort_unknown: float = 0.0
    abort_near_end: float = 0.0
    short_deadline: float = 0.0
    gateway_death: float = 0.0
    # a gateway that is asked who computes a preempted request again
    assign_lost: float = 0.0
    assign_late: float = 0.0
    assign_twice: float = 0.0
    assigned_leaves: float = 0.0
    # processes and network
    prefill_crash: float = 0.0
    decode_crash: float = 0.0
    slow_worker: float = 0.0
    partition: float = 0.0
    registry_loss: float = 0.0
    layout_differs: float = 0.0
    # what gateways know, and scale-down
    status_lost: float = 0.0
    status_late: float = 0.0
    list_lost: float = 0.0
    list_unread: float = 0.0
    list_late: float = 0.0
    list_emptied: float = 0.0
    cordon: float = 0.0
    scale_down: float = 0.0
    drain_short: float = 0.0
    drain_rude: float = 0.0
    drain_lost: float = 0.0
    restart_asked: float = 0.0
    start_fails: float = 0.0
    end_unheard: float = 0.0
    controller_crash: float = 0.0
    # clocks of workers
    clock_skew: float = 0.0
    clock_jump: float = 0.0
    # one step
    batch_permuted: float = 0.0
    outputs_permuted: float = 0.0
    kernel_stalls: float = 0.0
    page_taken_before: float = 0.0
    page_taken_during: float = 0.0
    page_taken_after: float = 0.0
    row_fails: float = 0.0
    step_fails: float = 0.0
    # pools
    pool_pressure: float = 0.0
    cache_rot: float = 0.0
    rude_call: float = 0.0

    @property
    def armed(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if getattr(self, f.name) > 0)

    def without(self, *names: str) -> Faults:
        """The same record with the named sites disarmed."""
        return replace(self, **dict.fromkeys(names, 0.0))


NO_FAULTS = Faults()


def site_names() -> tuple[str, ...]:
    return tuple(f.name for f in fields(Faults))


def sample_faults(seed: int) -> Faults:
    """Each site is armed in about a quarter of the seeds (swarm testing: Groce et al., ISSTA 2012)."""
    if random.Random(f"{seed}/calm").random() < CALM_SHARE:
        return NO_FAULTS
    return Faults(**{name: _rate(seed, name) for name in site_names()})


def _rate(seed: int, site: str) -> float:
    rng = random.Random(f"{seed}/armed/{site}")  # of its own, so that a new site leaves the others as they were
    rate = rng.choice(_SELDOM_RATES if site in _SELDOM else _RATES)
    return rate if rng.random() < ARMED_SHARE else 0.0


class Dice:
    """Decides every fault. A site has its own random stream, so that disarming one leaves the others as they were."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.armed = faults.armed
        self.over = False
        self.injected: Counter[str] = Counter()
        self._seed = seed
        self._streams: dict[str, random.Random] = {}

    def stream(self, name: str) -> random.Random:
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = random.Random(f"{self._seed}/{name}")
        return found

    def hit(self, site: str) -> bool:
        """Whether the site strikes now; counted."""
        rate: float = getattr(self.faults, site)
        if rate <= 0.0 or self.over or self.stream(site).random() >= rate:
            return False
        self.injected[site] += 1
        return True
