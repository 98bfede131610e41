"""A private cluster in this process, real in everything but Ray: gRPC gateway, both kinds of workers, shared memory.

The lab asks requests through the gateway, knows the oracle's answers, and tells when every page is back.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import grpc.aio

from cluster.config import load
from cluster.gateway.served import GatewayTokenizer, ServedModel, Sources, StreamChecks
from cluster.gateway.server import Gateway
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.selftest.injector import Injector
from cluster.settings import Config
from decode.engine import DecodeEngine
from genlock.v1 import inference_pb2, inference_pb2_grpc
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import GenlockError
from kvstore.guard import Guard
from kvstore.ids import PageRef
from kvstore.layout import KvFormat
from kvstore.transfer.common import monotonic_ms
from model.base import LanguageModel
from model.load import load_model
from model.sampling import SamplingParams
from prefill.engine import PrefillEngine
from sim.oracle import Oracle
from wire.clocks import now_ms
from wire.errors import from_rpc
from wire.options import open_channel

PAGE_TOKENS = 16
PROMPT_TOKENS = 64  # four full pages; the probe model's answer spells them all
REQUEST_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 10.0
# The same pages in another batch give the same numbers to about 1e-7; a prompt that is computed in other chunks, since
# part of it was cached, rounds differently.
LOGPROB_TOLERANCE = 0.03
THIEF = 1 << 40  # an owner number that no request has


@dataclass(frozen=True)
class Reply:
    """What the client saw. `error` is None only for an answer that was ended properly."""

    tokens: tuple[int, ...]
    error: GenlockError | None
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The oracle's: tokens, and how likely the model held each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def begins_with(self, reply: Reply) -> bool:
        """Every token that was sent is the oracle's."""
        return reply.tokens == self.tokens[: len(reply.tokens)]

    def differs(self, reply: Reply) -> bool:
        """A token differs, or a log-probability by more than rounding: the answer was computed from other numbers."""
        pairs = zip(reply.logprobs, self.logprobs, strict=False)
        return not self.begins_with(reply) or any(abs(a - b) > LOGPROB_TOLERANCE for a, b in pairs)


@dataclass(frozen=True)
class Subject:
    """A model under test with its oracle and its prompts; shared by all rows."""

    name: str
    model: LanguageModel
    tokenizer: GatewayTokenizer
    answer_tokens: int  # of a victim
    neighbour_tokens: int
    _answers: dict[tuple[tuple[int, ...], int], Answer] = field(default_factory=dict)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.model, page_tokens=PAGE_TOKENS, kv_format=KvFormat.INT8, slots=128)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """The oracle's answer, computed once."""
        key = (tuple(prompt), max_tokens)
        if key not in self._answers:
            out = self.oracle.answer(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0))
            logprobs = tuple(t.logprob or 0.0 for t in out)
            self._answers[key] = Answer(tuple(t.token_id for t in out), logprobs)
        return self._answers[key]

    def right(self, prompt: Sequence[int], reply: Reply) -> bool:
        """A whole answer, and the oracle's."""
        return reply.error is None and reply.tokens == self.answer(prompt, len(reply.tokens) or 1).tokens

    def prompt(self, name: str, tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
        """`tokens` ids, the same for a name every time, sharing no page with another name's."""
        rng = random.Random(f"prompt of {name}")
        if self.name == "probe":
            text = f"[{name}] " + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=tokens))
        else:
            words = rng.choices(" ".join(_WORDS).split(), k=tokens)
            text = f"{name} says: the secret words are {' '.join(words)}"
        ids = tuple(self.tokenizer.encode(text)[:tokens])
        assert len(ids) == tokens, "prompt texts are long enough"
        return ids


_WORDS = (
    "apple river stone cloud tiger violin copper meadow",
    "lantern harbor pepper falcon marble winter candle orange",
)


def load_subject(name: str) -> Subject:
    """`probe` or any model that `load_model` knows."""
    model, tokenizer = load_model(name)
    probe = name == "probe"
    return Subject(name, model, tokenizer, answer_tokens=64 if probe else 24, neighbour_tokens=320 if probe else 64)


class Client:
    """A real gRPC client of one gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._labels = itertools.count()

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, on_tokens: Callable[[int], None] | None = None
    ) -> Reply:
        """One request through the gateway; never raises for what the cluster answers."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        request = inference_pb2.GenerateRequest(
            request_id=f"lab-{next(self._labels)}",
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            sampling_params=inference_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0),
        )
        logprobs: list[float] = []
        tokens: list[int] = []
        error: GenlockError | None = None
        try:
            async for message in stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
                tokens.extend(message.token_ids)
                logprobs.extend(entry.logprob for entry in message.logprobs)
                if on_tokens is not None and tokens:
                    on_tokens(len(tokens))
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error)
        return Reply(tuple(tokens), error, tuple(logprobs))


def stream_checks(checks: Checks) -> StreamChecks:
    """What a gateway asks of decode's stream. Both that it is whole and that its end can be stand behind one check:
    each of them catches most of what the other does, so a control has neither."""
    on = checks.stream_end
    return StreamChecks(require_finished=on, require_all_tokens=on, judge_answers=on)


class Lab:
    """One cluster for one trial. `checks` are decode's; prefill keeps them all unless the row says otherwise."""

    def __init__(
        self,
        subject: Subject,
        checks: Checks = ALL_CHECKS,
        victim_tokens: int = PROMPT_TOKENS,
        *,
        prefill_flags: dict[str, object] | None = None,
        flags: dict[str, object] | None = None,
    ) -> None:
        self.subject = subject
        self.checks = checks
        self.victim_prompt = subject.prompt("victim", victim_tokens)
        self.inject = Injector()
        base: dict[str, object] = {
            "model.name": subject.name,
            "cluster.secret": os.urandom(16).hex(),
            "cache.page_tokens": PAGE_TOKENS,
            "cache.prefill_pages": 96,
            "cache.decode_pages": 96,
            "workers.threads": 2,
            "workers.status_poll_ms": 100,
            "api.port": 0,
            **(flags or {}),
        }
        self.config: Config = load(flags=base).config
        self._prefill_config = load(flags={**base, **(prefill_flags or {})}).config
        self.prefill: BuiltWorker
        self.decode: BuiltWorker
        self.gateway: Gateway
        self.client: Client
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.prefill = self._new_prefill()
        self.decode = BuiltWorker(
            WorkerSpec(Role.DECODE, "decode-0", self.config),
            self.inject.decode_tuning(self.checks, self.subject.model),
        )
        await self.prefill.start()
        await self.decode.start()
        served = ServedModel(self.subject.model.info, self.subject.tokenizer)
        self.gateway = Gateway(
            self.config, served, Sources(now_ms=now_ms, random_bytes=os.urandom),
            checks=stream_checks(self.checks),
        )  # fmt: skip
        endpoint = await self.gateway.start()
        self.gateway.add_worker("prefill-0", Role.PREFILL, self.prefill.endpoint)
        self.gateway.add_worker("decode-0", Role.DECODE, self.decode.endpoint)
        await self.gateway.wait_ready(30_000)
        self.client = Client(open_channel(endpoint))

    async def stop(self) -> None:
        self.inject.landing_gate.set()
        await self.client.channel.close(None)
        await self.gateway.stop(0)
        await self.decode.stop(0)
        await self.prefill.stop(0)

    def _new_prefill(self, port: int = 0) -> BuiltWorker:
        tuning: WorkerTuning = self.inject.prefill_tuning(ALL_CHECKS, self.subject.model, monotonic_ms)
        return BuiltWorker(WorkerSpec(Role.PREFILL, "prefill-0", self._prefill_config, port=port), tuning)

    async def restart_prefill(self) -> None:
        """Another life of the prefill worker: same name, same port, same slots, nothing remembered."""
        port = int(self.prefill.endpoint.rsplit(":", 1)[1])
        await self.prefill.stop(0)
        self.prefill = self._new_prefill(port)
        await self.prefill.start()
        await self.gateway.wait_ready(30_000)

    # --- requests -----------------------------------------------------------------------------------------------

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, on_tokens: Callable[[int], None] | None = None
    ) -> Reply:
        return await self.client.ask(prompt, max_tokens, on_tokens)

    async def ask_victim(self) -> Reply:
        return await self.ask(self.inject.victim, self.subject.answer_tokens)

    async def recycle(self, foreign: Sequence[int]) -> None:
        """Prefill gives up the victim's pages and computes `foreign` into the same slots."""
        engine = self.prefill_engine
        victim = self.inject.victim

        def give_up() -> None:
            for seq in list(engine.core._promised.values()):
                if seq.ticket.token_ids == victim:
                    engine.core.cancel(seq.request_no)
            engine.core.evict_all()

        await engine.loop.call(give_up)
        reply = await self.ask(foreign, 1)
        assert reply.error is None, f"the foreign prompt must be computed: {reply.error}"

    def from_thread(self, work: Callable[[], object]) -> None:
        """Runs a coroutine function from a worker's thread and waits for it."""
        coroutine = work()
        assert asyncio.iscoroutine(coroutine)
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(REQUEST_TIMEOUT_S)

    # --- inside the workers -------------------------------------------------------------------------------------

    @property
    def prefill_engine(self) -> PrefillEngine:
        assert isinstance(self.prefill.engine, PrefillEngine)
        return self.prefill.engine

    def decode_request_no(self, prompt: Sequence[int]) -> int | None:
        """The decode worker's number of a running request."""
        live = getattr(self.decode.engine, "_live")  # noqa: B009 # fault injection looks inside on purpose
        return next((no for no, item in live.items() if item.ticket.token_ids == tuple(prompt)), None)

    def decode_pages(self, prompt: Sequence[int]) -> tuple[int, tuple[PageRef, ...]]:
        """Request number and pages of a running request; (0, ()) when it does not run (yet, or any more)."""
        number = self.decode_request_no(prompt)
        engine = self.decode.engine
        assert isinstance(engine, DecodeEngine)
        request = engine.core.request(number) if number is not None else None
        if request is None or not request.joined:
            return 0, ()
        return request.request_no, request.pages.refs

    def steal(self, ref: PageRef, owner: int, source: PageRef) -> PageRef:
        """On decode's step thread: retires the owner's page and gives it to somebody else with other bytes in it."""
        guard: Guard = self.decode.guard
        guard.retire((ref,), owner)
        [stolen] = guard.allocate(THIEF, 1)
        assert stolen.page_id == ref.page_id, "the pool hands out the page that came back last"
        slots = guard._pool.slots_SU8
        slots[stolen.page_id] = slots[source.page_id]
        return stolen

    async def settled(self) -> bool:
        """Whether every page comes back on both sides within the limit."""
        engine = self.prefill_engine
        deadline = self._loop.time() + SETTLE_TIMEOUT_S
        while self._loop.time() < deadline:
            await engine.loop.call(engine.core.evict_all)
            await self.decode.engine.loop.call(lambda: None)
            if all(w.guard.free_pages == w.guard.slots for w in (self.prefill, self.decode)):
                return True
            await asyncio.sleep(0.02)
        return False
