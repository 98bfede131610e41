"""Where the fault table reaches into a cluster. One injector a cluster; everything is off until a row sets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.launch.build import WorkerTuning
from decode.core import StartHandoff
from decode.engine import DecodeHooks
from decode.pull import PullHooks
from genlock.v1 import worker_pb2
from kvstore.checks import Checks
from kvstore.receive import PageOrder
from kvstore.step import StepArrays, StepPlan
from kvstore.tables import I64, U8
from kvstore.transfer.base import PagePair, Peer, PoolExport, Transfer, TransferEngine, TransferState
from kvstore.transfer.common import slots_of
from kvstore.transfer.faults import NO_FAULTS, FaultHooks, TransferFaults, TransferInfo
from kvstore.transfer.faulty import FaultyEngine
from model.attention.base import KvStep
from model.base import LanguageModel
from model.runner import StepHooks

Message = worker_pb2.HandoffEvent


@dataclass
class Injector:
    """Mutable on purpose: a row arms it while the cluster runs. `victim` are the prompt ids that are hit."""

    victim: tuple[int, ...] = ()
    faults: TransferFaults = NO_FAULTS
    on_event: Callable[[StartHandoff, list[Message]], list[Message]] | None = None
    before_pull: Callable[[], None] | None = None
    before_copy: Callable[[], None] | None = None
    between_halves: Callable[[], None] | None = None
    after_landing: Callable[[U8, Sequence[int]], None] | None = None
    on_arrays: Callable[[StepArrays], None] | None = None
    wrap_kv: Callable[[StepPlan, KvStep], KvStep] | None = None
    before_decode_plan: Callable[[], bool] | None = None
    landing_gate: threading.Event = field(default_factory=threading.Event)
    clock_shift_ms: int = 0
    recorded: dict[tuple[int, ...], list[Message]] = field(default_factory=dict)
    _bundles: dict[int, list[Message]] = field(default_factory=dict)
    _pulling: threading.local = field(default_factory=threading.local)

    # --- decode -------------------------------------------------------------------------------------------------

    def decode_tuning(self, checks: Checks, model: LanguageModel) -> WorkerTuning:
        return WorkerTuning(
            checks=checks,
            model=model,
            wrap_engine=self._wrap_engine,
            decode=DecodeHooks(before_plan=self._before_decode_plan),
            pull=PullHooks(on_event=self._on_event, before_pull=self._before_pull),
            step=StepHooks(on_arrays=self._on_arrays, wrap_kv=self._wrap_kv),
        )

    def prefill_tuning(self, checks: Checks, model: LanguageModel, clock: Callable[[], int]) -> WorkerTuning:
        return WorkerTuning(checks=checks, model=model, clock=lambda: clock() + self.clock_shift_ms)

    def _wrap_engine(self, engine: TransferEngine) -> TransferEngine:
        hooks = FaultHooks(before_copy=self._before_copy, between_halves=self._between_halves)
        return LandingEngine(FaultyEngine(engine, self._plan, hooks, self.landing_gate), self._after_landing)

    def _on_event(self, start: StartHandoff, message: Message) -> list[Message]:
        """Keeps page messages back until the handoff is complete, so that one pull takes them all."""
        ids = start.ticket.token_ids
        bundle = self._bundles.setdefault(start.request_no, [])
        if message.WhichOneof("event") == "page":
            bundle.append(message)
            return []
        if message.WhichOneof("event") != "completed":
            return self._changed(start, [message]) if ids == self.victim else [message]
        del self._bundles[start.request_no]
        self.recorded.setdefault(ids, list(bundle))
        messages = [*bundle, message]
        return self._changed(start, messages) if ids == self.victim else messages

    def _changed(self, start: StartHandoff, messages: list[Message]) -> list[Message]:
        return messages if self.on_event is None else self.on_event(start, messages)

    def _before_pull(self, start: StartHandoff, orders: tuple[PageOrder, ...]) -> None:
        self._pulling.victim = start.ticket.token_ids == self.victim
        if self._pulling.victim and self.before_pull is not None:
            self.before_pull()

    def _is_victim(self) -> bool:
        """Whether the pull of this thread is the victim's."""
        return bool(getattr(self._pulling, "victim", False))

    def _plan(self, info: TransferInfo) -> TransferFaults:
        return self.faults if self._is_victim() else NO_FAULTS

    def _before_copy(self, pairs: Sequence[PagePair]) -> None:
        if self.before_copy is not None and self._is_victim():
            self.before_copy()

    def _between_halves(self, pair: PagePair) -> None:
        if self.between_halves is not None and self._is_victim():
            self.between_halves()

    def _after_landing(self, slots_SU8: U8, page_ids: Sequence[int]) -> bool:
        if self.after_landing is None or not self._is_victim():
            return False
        self.after_landing(slots_SU8, page_ids)
        return True

    def _before_decode_plan(self) -> bool:
        return True if self.before_decode_plan is None else self.before_decode_plan()

    def _on_arrays(self, arrays: StepArrays) -> None:
        if self.on_arrays is not None:
            self.on_arrays(arrays)

    def _wrap_kv(self, plan: StepPlan, kv: KvStep) -> KvStep:
        return kv if self.wrap_kv is None else self.wrap_kv(plan, kv)


class LandingEngine(TransferEngine):
    """Calls a hook on our slots after each copy; the rest is the inner engine's."""

    def __init__(self, inner: TransferEngine, after_landing: Callable[[U8, Sequence[int]], bool]) -> None:
        self.name = inner.name
        self._inner = inner
        self._after_landing = after_landing
        self._slots_SU8: U8 | None = None

    def allocate(self, slots: int, slot_bytes: int) -> U8:
        buffer = self._inner.allocate(slots, slot_bytes)
        self._slots_SU8 = slots_of(buffer, slots, slot_bytes)
        return buffer

    def publish(self, incarnation: int, layout: str) -> PoolExport:
        return self._inner.publish(incarnation, layout)

    def connect(self, export: PoolExport) -> Peer:
        return self._inner.connect(export)

    def read_pages(self, peer: Peer, pairs: Sequence[PagePair]) -> Transfer:
        return _Landing(self._inner.read_pages(peer, pairs), self, [p.local_page_id for p in pairs])

    def read_tags(self, peer: Peer, timeout_ms: int) -> I64:
        return self._inner.read_tags(peer, timeout_ms)

    def disconnect(self, peer: Peer) -> None:
        self._inner.disconnect(peer)

    def regions(self) -> int:
        return self._inner.regions()

    def close(self) -> None:
        self._slots_SU8 = None
        self._inner.close()

    def landed(self, page_ids: Sequence[int]) -> bool:
        return self._slots_SU8 is not None and self._after_landing(self._slots_SU8, page_ids)


class _Landing(Transfer):
    def __init__(self, inner: Transfer, engine: LandingEngine, page_ids: Sequence[int]) -> None:
        self._inner = inner
        self._engine = engine
        self._page_ids = page_ids
        self._changed = False

    def wait(self, timeout_ms: int) -> TransferState:
        state = self._inner.wait(timeout_ms)
        if state is TransferState.DONE:
            self._changed = self._engine.landed(self._page_ids)
        return state

    def quiesced(self) -> bool:
        return self._inner.quiesced()

    @property
    def body_sums(self):  # type: ignore[no-untyped-def] # the inner engine's type
        return None if self._changed else self._inner.body_sums
