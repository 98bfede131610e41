"""One simulated run: the cluster, its callers, the faults and the laws, all decided by one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, KeysView, Sequence
from dataclasses import dataclass

from cluster.control.core import unsettled
from decode.core import DecodeLimits
from kvstore.checks import Checks
from kvstore.digest import Digester
from kvstore.errors import GenlockError, InvalidInput, NoCapacity, Unavailable
from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.layout import PageLayout
from kvstore.transfer.faults import FaultHooks
from sim import audit, deadlines
from sim.callers import Callers, Request
from sim.compute import Oracle, small_layouts
from sim.control_side import Controller
from sim.copies import Copies
from sim.decode_side import DecodeWorker
from sim.events import Heap
from sim.faults import Dice, Faults
from sim.gateway_side import Gateway, WorkerList
from sim.laws import LAWS, Broken, Laws, Violation
from sim.load import PROBE_TOKENS, Shape, draw_probe, draw_shape, draw_wishes
from sim.mischief import Mischief
from sim.net import Call, Net
from sim.prefill_side import PrefillWorker
from sim.watch import Tally, WatchedFabric
from sim.worker import Worker

SECRET = b"the simulator's own secret"
CALM_AFTER_MS = 150  # faults stop so long after the last request
PROBE_AFTER_MS = 100  # time for every gateway to look at every worker again
LIMIT_MS = 17_000  # more than the longest request, and then the longest drain
HEAVY_EVERY = 32  # events between two audits of all workers, touched or not, and of all due times
EVERY_EVENT_SHARE = 0.1  # of the seeds, in which all that is audited after every event


@dataclass(frozen=True)
class Kit:
    """What all runs of a process share; immutable."""

    layouts: tuple[PageLayout, ...]
    digester: Digester


def make_kit() -> Kit:
    layouts = small_layouts()
    return Kit(layouts, Digester(SECRET, layouts[0].slot_bytes))


class World:
    """Built from a seed, a fault record and a check record; `run` plays it to its end."""

    def __init__(
        self,
        seed: int,
        kit: Kit,
        faults: Faults,
        checks: Checks,
        *,
        laws: frozenset[str] = frozenset(LAWS),
        only: Collection[int] | None = None,
        heavy_every: int | None = None,
    ) -> None:
        self.seed, self.kit, self.checks = seed, kit, checks
        self.heap = Heap()
        self.dice = Dice(seed, faults)
        self.laws = Laws(laws)
        self.tally = Tally()
        self.shape: Shape = draw_shape(seed)
        layout = kit.layouts[self.shape.layout]
        # The same identity everywhere: a worker with another layout then differs in nothing but its layout.
        self.keyer = PrefixKeyer(SECRET, PrefixIdentity("sim", "sim", layout.fingerprint))
        self.copies = Copies(self)
        self.fabric = WatchedFabric(self.copies.ended, self.copies.again_ms, self._land_later)
        self.fabric.plan = self.copies.plan
        self.fabric.hooks = FaultHooks(between_halves=self.copies.between_halves)
        self.net = Net(self)
        self.incarnations: set[int] = set()
        self._made_ids: set[bytes] = set()
        self.list = WorkerList()
        self.partition: tuple[str, str, int] = ("", "", 0)
        self.requests: list[Request] = []
        self._oracles: dict[tuple[int, ...], Oracle] = {}
        self._heavy_every = heavy_every or audited_every(seed)
        self.prefills = [PrefillWorker(self, i, self.shape.prefill_limits) for i in range(self.shape.prefills)]
        self.decodes = [DecodeWorker(self, i, self._decode_limits()) for i in range(self.shape.decodes)]
        self.workers: list[Worker] = [*self.prefills, *self.decodes]
        self._by_name = {worker.name: worker for worker in self.workers}
        self.controller = Controller(self)
        self.gateways = [Gateway(self, i) for i in range(self.shape.gateways)]
        self.mischief = Mischief(self)
        wishes = [w for w in draw_wishes(seed, self.shape) if only is None or w.number in only]
        self.callers = Callers(self, wishes)
        self.probes: list[Request] = []
        self._probed = False
        self._calm_since_ms: int | None = None
        self.calm_ms = (wishes[-1].at_ms if wishes else 0) + CALM_AFTER_MS

    def _decode_limits(self) -> DecodeLimits:
        return self.shape.decode_limits

    def prefill_layout(self, index: int) -> tuple[PageLayout, bool]:
        """The last prefill worker may have another layout of the same size; and whether its status tells it."""
        place, tells = self.shape.layout, True
        if index and self.dice.faults.layout_differs > 0:
            self.dice.injected["layout_differs"] += 1
            place += 1
            tells = self.dice.stream("layout_differs/told").random() < 0.3
        return self.kit.layouts[place % len(self.kit.layouts)], tells

    @property
    def names(self) -> KeysView[str]:
        """Every name that a worker has or had."""
        return self._by_name.keys()

    def find(self, name: str) -> Worker | None:
        return self._by_name.get(name)

    def worker(self, name: str) -> Worker:
        return self._by_name[name]

    def bring_up(self, name: str) -> Worker:
        """A process under a name: a new life of a known worker, or a worker that never was."""
        worker = self._by_name.get(name)
        if worker is not None:
            if worker.alive:  # nobody heard that it still lives: the new one takes its place
                self.stop_worker(worker, "lost")
            worker.start()
            return worker
        role, _, index = name.partition("-")
        if role == "prefill":
            prefill = PrefillWorker(self, int(index), self.shape.prefill_limits)
            self.prefills.append(prefill)
            worker = prefill
        else:
            decode = DecodeWorker(self, int(index), self._decode_limits())
            self.decodes.append(decode)
            worker = decode
        self.workers.append(worker)
        self._by_name[name] = worker
        return worker

    def oracle(self, tokens: Sequence[int]) -> Oracle:
        key = tuple(tokens)
        found = self._oracles.get(key)
        if found is None:
            found = self._oracles[key] = Oracle(key)
        return found

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> list[Violation]:
        """Plays all events. Returns the broken law, if any."""
        try:
            self._play()
            audit.settle(self)
        except Broken as broken:
            return [Violation(broken.law, broken.detail, self.heap.now_ms, self.heap.events)]
        except Exception as surprise:
            # Whatever else escapes an event is a fault of the product (or of the simulator), never a verdict.
            reason = getattr(surprise, "reason", str(surprise))
            detail = f"{type(surprise).__name__}: {reason}{_place(surprise)}"
            return [Violation("crash", detail, self.heap.now_ms, self.heap.events)] * self.laws.enforces("crash")
        return []

    def _play(self) -> None:
        heap, heavy = self.heap, self._heavy_every
        while not self.finished():
            heap.run_next()
            audit.light(self)
            in_full = heap.events % heavy == 0
            audit.books(self, every=in_full)
            if in_full:
                deadlines.judge(self)
                self.controller.judge_overdue()
            if not self.dice.over and heap.now_ms >= self.calm_ms:
                self.mischief.stop()
            if heap.now_ms > LIMIT_MS:
                waiting = [r.number for r in self.requests if not r.ended]
                if not waiting and not self.controller.settled:
                    self.laws.broken("fleet_not_restored", unsettled(self.controller.state))
                self.laws.broken("never_ended", f"requests {waiting or 'none'}, workers still at work")
                return

    def finished(self) -> bool:
        if self.callers.left or not self.dice.over or not all(r.ended for r in self.requests):
            return not len(self.heap)
        # A cordon ends by itself; the record of a worker that is gone may keep one.
        cordoned = any(self.worker(name).alive for name in self.list.cordoned)
        at_work = cordoned or any(w.working for w in self.workers if w.alive) or not self.controller.settled
        if at_work or self.net.open:
            self._calm_since_ms = None
            return False
        if self._probed:
            return True
        if self._calm_since_ms is None:
            self._calm_since_ms = self.heap.now_ms
        if self.heap.now_ms - self._calm_since_ms >= PROBE_AFTER_MS:
            self._probed = True
            self._probe()
        return self._probed and not self.probes

    def _probe(self) -> None:
        """Once more through each gateway, with no fault left: everything is in service again."""
        # An unproved copy keeps its pages; a layout that nobody tells makes a route that cannot work.
        starved = any(d.guard.free_pages < PROBE_TOKENS for d in self.decodes)
        if starved or self.dice.faults.layout_differs > 0:
            return
        for index in range(len(self.gateways)):
            wish = draw_probe(self.seed, index)
            self.callers.send(wish, wish.ticket, 1, wish.deadline_ms, "asked")
        self.probes = self.requests[-len(self.gateways) :]

    # --- what callers see -------------------------------------------------------------------------------------------

    def on_token(self, request: Request, token: int) -> None:
        laws, index = self.laws, len(request.tokens)
        laws.require(not request.ended, "token_after_end", f"request {request.number}")
        request.tokens.append(token)
        if request.awaits and request.gateway_life == request.gateway.life:
            request.gateway.on_computed(request)
        request.awaits = False
        self.heap.note(f"{request.number}:{token}")
        wanted = request.oracle.answer(index)
        if token != wanted:
            laws.broken("wrong_token", f"request {request.number} token {index}: {token}, the oracle says {wanted}")
        if index + 2 >= request.whole:
            self.callers.nearly_done(request.asked)
        if index >= request.whole:
            laws.broken("wrong_length", f"request {request.number} token {index} of {request.whole}")

    def on_end(self, request: Request, error: GenlockError | None) -> None:
        self.laws.require(not request.ended, "ended_twice", f"request {request.number}")
        if error is not None and not request.ended and self.callers.moved(request, error):
            return
        request.ended, request.error = True, error
        self.heap.note(f"{request.number}:{error.reason if error else 'ok'}")
        if request.gateway_life == request.gateway.life:
            request.gateway.on_end(request, error)
        if error is not None:
            if not request.given_up:  # not for its own failure
                self.controller.judge_end(request, error)
        elif len(request.tokens) != request.whole:
            self.laws.broken("wrong_length", f"request {request.number}: {len(request.tokens)} of {request.whole}")
        if isinstance(error, InvalidInput):
            self.laws.broken("blames_the_caller", f"request {request.number}: {error.reason} in {error.field}")
        # A caller that went away or aborted it, or a pool that is too small, needs no fault.
        excused = isinstance(error, NoCapacity) or request.asked.stopped_by is not None
        if error is not None and not self.dice.armed and not excused:
            self.laws.broken("failed_without_fault", f"request {request.number}: {error.reason}")
        self.callers.answered(request, error)

    def judge_id(self, made_id: bytes, whose: str) -> None:
        """A server made an id, for an attempt or for a handoff."""
        self.laws.require(made_id not in self._made_ids, "id_repeats", f"{whose}: {made_id.hex()}")
        self._made_ids.add(made_id)

    def stop_worker(self, worker: Worker, how: str) -> None:
        """The process ends; `how` says in its requests' errors whether it was `lost` or `stopped`."""
        worker.die()
        self.mischief.worker_gone(worker)
        if isinstance(worker, PrefillWorker):
            self.net.prefill_lost(worker, how)
        elif isinstance(worker, DecodeWorker):
            self.net.decode_lost(worker)
            for request in worker.requests.values():
                if not request.given_up:
                    self.on_end(request, Unavailable(f"decode_{how}", "the decode worker is gone"))

    # --- copies -----------------------------------------------------------------------------------------------------

    def blocked_ms(self, call: Call) -> int:
        one, other, until_ms = self.partition
        cut = (one, other) == (call.prefill.name, call.decode.name)
        return max(0, until_ms - self.heap.now_ms) if cut else 0

    def _land_later(self, delay_ms: int) -> None:
        self.heap.after(delay_ms, "land-again", self.land)

    def land(self) -> None:
        self.fabric.pump(self.heap.now_ms)

    def facts(self) -> Counter[str]:
        """How the requests ended."""
        return Counter(r.error.reason if r.error else "ok" for r in self.requests if r.ended)


def audited_every(seed: int) -> int:
    """Events between two full audits: who is late for less than that passes in most seeds, in the others not."""
    return 1 if random.Random(f"{seed}/audit").random() < EVERY_EVENT_SHARE else HEAVY_EVERY


def _place(surprise: BaseException) -> str:
    """Where an exception was raised: file and line of the innermost frame."""
    at = surprise.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f" ({at.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{at.tb_lineno})"
