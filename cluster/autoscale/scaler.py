"""From workers' own counts to signals, and from a decision to what is asked of the fleet.

Workers tell sums that only grow within one life; what happened in the last window is the difference of two tellings. A
ready worker that tells nothing makes its role's numbers missing: the policy holds, rather than take the others for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from cluster.autoscale.decide import Counts, Decision, Memory, decide
from cluster.autoscale.policy import Policy, policy_from
from cluster.autoscale.signals import DecodeSignals, PrefillSignals, Signals
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import worker_pb2

WINDOW_MS = 30_000.0
MAX_SAMPLES = 64
MAX_LIVES = 8192


@dataclass(frozen=True)
class Told:
    """One worker's answer. `status` None: it did not answer. `ready`: new requests may go to it. `at_ms`: when the
    status was asked for, on the clock of the decisions; None: just now."""

    worker_id: str
    role: str
    ready: bool
    status: worker_pb2.WorkerStatus | None
    at_ms: float | None = None


@dataclass
class _Life:
    """Readings of one life of a worker, oldest first."""

    readings: deque[tuple[float, worker_pb2.LoadCounters]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))


class Meter:
    """Keeps the window of every life. Not thread-safe."""

    def __init__(self, window_ms: float = WINDOW_MS) -> None:
        self._window_ms = window_ms
        self._lives: dict[tuple[str, int], _Life] = {}
        # The last measured speed of a busy prefill worker: an idle fleet still knows it.
        self._speed = 0.0

    def read(self, told: Sequence[Told], now_ms: float) -> Signals:
        present = set()
        for one in told:
            if one.status is None:
                continue
            key = (one.worker_id, one.status.incarnation)
            present.add(key)
            life = self._lives.setdefault(key, _Life())
            readings = life.readings
            at_ms = now_ms if one.at_ms is None else one.at_ms
            # Closer samples than a window's share would push the old ones out.
            if not readings or at_ms - readings[-1][0] >= self._window_ms / (MAX_SAMPLES - 2):
                readings.append((at_ms, one.status.load))
            while len(readings) > 2 and readings[1][0] <= now_ms - self._window_ms:
                readings.popleft()
        for key in [key for key in self._lives if key not in present][:MAX_LIVES]:
            del self._lives[key]
        return Signals(self._prefill(told, now_ms), self._decode(told, now_ms), self._arrivals(told))

    def _moved(self, one: Told, name: str) -> float:
        """How much a sum grew in the window; a life of one reading has grown by all it has."""
        assert one.status is not None
        readings = self._lives[one.worker_id, one.status.incarnation].readings
        before = getattr(readings[0][1], name) if len(readings) > 1 else 0
        return float(max(0, getattr(one.status.load, name) - before))

    def _span_s(self, told: Sequence[Told], now_ms: float) -> float:
        """Seconds that the window reaches back: the longest of any worker, at least one."""
        starts = [
            life.readings[0][0]
            for one in told
            if one.status is not None and (life := self._lives.get((one.worker_id, one.status.incarnation)))
        ]
        return max(1.0, (now_ms - min(starts, default=now_ms)) / 1000)

    def _prefill(self, told: Sequence[Told], now_ms: float) -> PrefillSignals:
        workers = [one for one in told if one.role == "prefill"]
        silent = any(one.ready and one.status is None for one in workers)
        answered = [one for one in workers if one.status is not None]
        if silent:
            return PrefillSignals(now_ms, None, None, None, None, None)
        busy_ms = sum(self._moved(one, "busy_ms") for one in answered)
        computed = sum(self._moved(one, "computed_tokens") for one in answered)
        # A few steps say little about the speed of a busy worker.
        if busy_ms >= 50:
            self._speed = computed / busy_ms * 1000
        waited = sum(self._moved(one, "queued") for one in answered)
        return PrefillSignals(
            at_ms=_oldest_ms(answered, now_ms),
            ready=sum(one.ready for one in workers),
            backlog_tokens=float(sum(one.status.load.backlog_tokens for one in answered if one.status)),
            arriving_tokens_per_s=sum(self._moved(one, "arrived_tokens") for one in answered)
            / self._span_s(answered, now_ms),
            worker_tokens_per_s=self._speed,
            queue_ms=sum(self._moved(one, "queue_ms") for one in answered) / waited if waited else 0.0,
            ttft_ms=self._ttft(told),
            unseen=float(len(workers) - len(answered)),
        )

    def _ttft(self, told: Sequence[Told]) -> float | None:
        answered = [one for one in told if one.role == "decode" and one.status is not None]
        count = sum(self._moved(one, "first_tokens") for one in answered)
        return sum(self._moved(one, "first_token_ms") for one in answered) / count if count else None

    def _decode(self, told: Sequence[Told], now_ms: float) -> DecodeSignals:
        workers = [one for one in told if one.role == "decode"]
        if any(one.ready and one.status is None for one in workers):
            return DecodeSignals(now_ms, None, None, None, None, None, None, None)
        answered = [one for one in workers if one.status is not None]
        ready = [one.status for one in answered if one.ready and one.status]
        statuses = [one.status for one in answered if one.status]
        tokens = sum(self._moved(one, "token_count") for one in answered)
        return DecodeSignals(
            at_ms=_oldest_ms(answered, now_ms),
            ready=sum(one.ready for one in workers),
            running=float(sum(status.running_requests for status in statuses)),
            waiting=float(sum(status.waiting_requests for status in statuses)),
            worker_slots=sum(status.load.slots for status in ready) / len(ready) if ready else 0.0,
            pages=float(sum(status.pool.pages for status in ready)),
            free_pages=float(sum(status.pool.free + status.pool.cached for status in ready)),
            quarantined_pages=float(sum(status.pool.quarantined for status in ready)),
            token_ms=sum(self._moved(one, "token_ms") for one in answered) / tokens if tokens else None,
            unseen=float(len(workers) - len(answered)),
        )

    def _arrivals(self, told: Sequence[Told]) -> float | None:
        """Requests that came to decode workers in the window; None where nobody could have told."""
        answered = [one for one in told if one.role == "decode" and one.status is not None]
        return sum(self._moved(one, "arrived_requests") for one in answered) if answered else None


def _oldest_ms(answered: Sequence[Told], now_ms: float) -> float:
    """When the oldest answer was asked for: the policy judges whether that is too long ago."""
    return min((one.at_ms for one in answered if one.at_ms is not None), default=now_ms)


class Scaler:
    """Memory between decisions."""

    def __init__(self, window_ms: float = WINDOW_MS) -> None:
        self._meter = Meter(window_ms)
        self._memory = Memory()
        self._text = ""
        self._policy = Policy()

    def decide(
        self, text: str, told: Sequence[Told], current: Counts, now_ms: float, at_door: float | None = None
    ) -> Decision:
        """`text`: the policy's YAML. `at_door`: requests that came to gateways since the last decision, or wait there;
        it is what wakes a fleet that has gone to zero. None: no gateway tells, so nobody could wake it, and it does
        not go there. Raises InvalidInput when the policy cannot be read."""
        if text != self._text:
            # Wishes under another policy say nothing about this one.
            self._policy, self._text, self._memory = policy_from(text), text, Memory()
        seen = self._meter.read(told, now_ms)
        arrivals = None if at_door is None else max(at_door, seen.arrivals or 0.0)
        seen = Signals(seen.prefill, seen.decode, arrivals)
        if current == Counts(0, 0) and at_door:
            waiting = DecodeSignals(**{**asdict(seen.decode), "waiting": at_door})
            backlog = PrefillSignals(**{**asdict(seen.prefill), "backlog_tokens": at_door})
            seen = Signals(backlog, waiting, seen.arrivals)
        self._memory, decision = decide(self._policy, self._memory, seen, current, now_ms)
        return decision


def decision_message(decision: Decision, unix_ms: int) -> pb.AutoscaleDecision:
    def counts(of: Counts) -> pb.RoleCounts:
        return pb.RoleCounts(prefill=of.prefill, decode=of.decode)

    return pb.AutoscaleDecision(
        at_ms=unix_ms,
        inputs=dict(decision.inputs),
        raw=counts(decision.raw),
        clamped=counts(decision.clamped),
        delayed=counts(decision.delayed),
        target=counts(decision.target),
        before=counts(decision.before),
        reasons=decision.reasons,
        held=decision.held,
    )
