"""What the controller tells Prometheus: the fleet as it keeps it, and how it does itself. Everything is read when it is
scraped, from any thread; the turns only count plain integers.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.control.controller import Controller
from cluster.control.core import unsettled
from cluster.control.operations import Moved, Operations
from cluster.control.state import Phase
from cluster.roles import Role
from wire.metrics import build_info, new_registry

MS = 1000.0
ROLE = "controller"


@dataclass(frozen=True)
class ControllerReading:
    """The controller at one moment."""

    phases: Mapping[tuple[Role, Phase], int]
    desired: Mapping[Role, int]
    settled: bool
    restarts: Mapping[Role, int]
    failed_starts: Mapping[Role, int]
    events: int
    events_waiting: int
    decisions: Mapping[tuple[Role, Moved], int]
    registry_up: bool
    refills: int
    loop_age_ms: float
    surprises: int


def read_controller(controller: Controller, operations: Operations) -> ControllerReading | None:
    """None once a later life of the controller has taken over: what this one knows says nothing any more."""
    if controller.superseded:
        return None
    state, tally = controller.state, controller.tally
    return ControllerReading(
        phases=Count((row.role, row.phase) for row in state.rows.values()),
        desired={role: state.wanted(role) for role in Role},
        settled=not unsettled(state),
        restarts=dict(tally.restarts),
        failed_starts=dict(tally.failed_starts),
        events=tally.events,
        events_waiting=controller.events_waiting,
        decisions=dict(operations.moved),
        registry_up=not controller.registry_error,
        refills=tally.refills,
        loop_age_ms=max(0.0, controller.clocks.now_ms() - tally.turned_ms),
        surprises=controller.surprises + operations.surprises,
    )


class ControllerCollector(Collector):
    """`version`: where the process has no other collector that tells what runs in it."""

    def __init__(self, read: Callable[[], ControllerReading | None], version: str = "") -> None:
        self._read = read
        self._version = version

    def collect(self) -> Iterator[Metric]:
        if self._version:
            yield build_info(version=self._version, role=ROLE)
        reading = self._read()
        if reading is not None:
            yield from _fleet(reading)
            yield from _self(reading)


def controller_registry(read: Callable[[], ControllerReading | None], version: str) -> CollectorRegistry:
    """Of a controller in a process of its own."""
    return new_registry(ControllerCollector(read, version))


def _fleet(reading: ControllerReading) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        "genlock_fleet_workers", "Workers that the controller keeps, by phase.", labels=("role", "phase")
    )
    for role in Role:
        for phase in Phase:
            workers.add_metric((role.value, phase.value.lower()), reading.phases.get((role, phase), 0))
    yield workers
    desired = GaugeMetricFamily("genlock_fleet_desired_workers", "Workers that are wanted.", labels=("role",))
    for role, count in reading.desired.items():
        desired.add_metric((role.value,), count)
    yield desired
    yield GaugeMetricFamily("genlock_fleet_settled", "1 while the fleet is as it is wanted.", float(reading.settled))
    yield GaugeMetricFamily(
        "genlock_fleet_drains", "Drains that are under way.",
        sum(reading.phases.get((role, Phase.DRAINING), 0) for role in Role),
    )  # fmt: skip
    for name, doc, counts in (
        ("genlock_fleet_restarts", "Workers that were started again.", reading.restarts),
        ("genlock_fleet_failed_starts", "Starts of workers that failed.", reading.failed_starts),
    ):
        family = CounterMetricFamily(name, doc, labels=("role",))
        for role, count in counts.items():
            family.add_metric((role.value,), count)
        yield family
    decisions = CounterMetricFamily(
        "genlock_autoscale_decisions", "Decisions of the autoscaler that were held or carried out, by role.",
        labels=("role", "outcome"),
    )  # fmt: skip
    for role in Role:
        for moved in Moved:
            decisions.add_metric((role.value, moved.value), reading.decisions.get((role, moved), 0))
    yield decisions


def _self(reading: ControllerReading) -> Iterator[Metric]:
    yield CounterMetricFamily("genlock_controller_events", "Events that the registry has kept.", reading.events)
    yield GaugeMetricFamily(
        "genlock_controller_events_waiting", "Events that the registry has not taken yet.", reading.events_waiting
    )
    yield GaugeMetricFamily(
        "genlock_controller_registry_up", "1 while the registry answers the controller.", float(reading.registry_up)
    )
    yield CounterMetricFamily(
        "genlock_controller_registry_refills", "Times that the registry had lost what is wanted, and got it again.",
        reading.refills,
    )  # fmt: skip
    yield GaugeMetricFamily(
        "genlock_controller_loop_age_seconds", "Time since the reconcile loop last turned.", reading.loop_age_ms / MS
    )
    yield CounterMetricFamily(
        "genlock_controller_surprises", "Untyped errors that the controller survived.", reading.surprises
    )
