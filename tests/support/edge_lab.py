"""A lab whose handoffs run as they would in production, with places to look, to wait and to break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from cluster.launch.build import WorkerTuning
from cluster.selftest.injector import Injector, Message
from cluster.selftest.lab import Lab, Subject
from decode.core import StartHandoff
from decode.engine import DecodeHooks
from decode.pull import PullHooks
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc
from kvstore.checks import Checks
from kvstore.errors import GenlockError
from kvstore.receive import PageOrder
from model.base import LanguageModel
from model.runner import StepHooks
from model.sampler import SampledToken
from model.sampling import SamplingParams
from prefill.engine import PrefillHooks
from wire.errors import from_rpc

TIMEOUT_S = 60.0
# Far fewer than a request that nobody ended would take.
LATE_STEPS = 12


@dataclass
class Seen:
    """All that a client saw of one request."""

    messages: list[pb.GenerateResponse] = field(default_factory=list)
    error: GenlockError | None = None

    def text(self, index: int = 0) -> str:
        return "".join(m.text for m in self.messages if m.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [t for m in self.messages if m.index == index for t in m.token_ids]

    def logprobs(self, index: int = 0) -> list[pb.TokenLogprob]:
        return [entry for m in self.messages if m.index == index for entry in m.logprobs]

    def finished(self, index: int = 0) -> pb.Finished:
        [last] = [m for m in self.messages if m.index == index and m.HasField("finished")]
        assert last is [m for m in self.messages if m.index == index][-1], "nothing follows the end"
        return last.finished


class Hooks(Injector):
    """Passes everything on; a test replaces what it needs. `victim` limits nothing here."""

    each_event: Callable[[StartHandoff, Message], list[Message]] | None = None
    each_pull: Callable[[StartHandoff, tuple[PageOrder, ...]], None] | None = None
    before_prefill_plan: Callable[[], bool] | None = None
    prefill_event: Callable[..., list[Any]] | None = None

    def decode_tuning(self, checks: Checks, model: LanguageModel) -> WorkerTuning:
        return WorkerTuning(
            checks=checks,
            model=model,
            wrap_engine=self._wrap_engine,
            decode=DecodeHooks(before_plan=self._before_decode_plan),
            pull=PullHooks(on_event=self._event, before_pull=self._pull),
            step=StepHooks(on_arrays=self._on_arrays, wrap_kv=self._wrap_kv),
        )

    def prefill_tuning(self, checks: Checks, model: LanguageModel, clock: Callable[[], int]) -> WorkerTuning:
        hooks = PrefillHooks(on_event=self._prefill_event, before_plan=self._before_prefill_plan)
        return replace(super().prefill_tuning(checks, model, clock), prefill=hooks)

    def _event(self, start: StartHandoff, message: Message) -> list[Message]:
        return [message] if self.each_event is None else self.each_event(start, message)

    def _pull(self, start: StartHandoff, orders: tuple[PageOrder, ...]) -> None:
        if self.each_pull is not None:
            self.each_pull(start, orders)

    def _before_prefill_plan(self) -> bool:
        return True if self.before_prefill_plan is None else self.before_prefill_plan()

    def _prefill_event(self, seq: object, event: object) -> list[Any]:
        return [event] if self.prefill_event is None else self.prefill_event(seq, event)


class EdgeLab(Lab):
    """`hooks` is what a test may reach into."""

    def __init__(self, subject: Subject, **flags: object) -> None:
        super().__init__(subject, flags=flags)
        self.hooks = Hooks()
        self.inject = self.hooks
        self._asked = 0

    def call(self, prompt: Sequence[int] | str, *, request_id: str = "", stream: bool = True,
             metadata: tuple[tuple[str, str], ...] = (), **params: object) -> Any:  # fmt: skip
        self._asked += 1
        request = pb.GenerateRequest(
            request_id=request_id or f"edge-{self._asked}",
            sampling_params=pb.SamplingParams(**params),
            stream=stream,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.token_ids.extend(prompt)
        stub = inference_pb2_grpc.InferenceServiceStub(self.client.channel)
        return stub.Generate(request, timeout=TIMEOUT_S, metadata=metadata)

    async def see(self, prompt: Sequence[int] | str, **kwargs: object) -> Seen:
        """One request through the gateway."""
        return await self.read(self.call(prompt, **kwargs))

    async def read(self, call: Any) -> Seen:
        seen = Seen()
        try:
            async for message in call:
                seen.messages.append(message)
        except grpc.aio.AioRpcError as error:
            seen.error = from_rpc(error)
        return seen

    def wanted(self, prompt: Sequence[int] | str, **params: Any) -> list[SampledToken]:
        """The oracle's answer."""
        ids = self.subject.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        params.setdefault("max_tokens", 128)
        params["stop_token_ids"] = tuple(params.get("stop_token_ids", ()))
        return self.subject.oracle.answer(ids, SamplingParams(**params))

    def text_of(self, token_ids: Sequence[int]) -> str:
        stream = self.subject.tokenizer.stream()
        return "".join(stream.push(t) for t in token_ids) + stream.finish()

    async def until(self, true: Callable[[], object], what: str = "") -> None:
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while not true():
            assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
            await asyncio.sleep(0.002)

    async def require_quiet(self) -> None:
        """Every page is back on both sides, nobody waits or runs, and nothing is computed any more. A request that was
        on its way when its caller left may still begin; it does not go on."""
        engines = (self.prefill.engine, self.decode.engine)
        first: list[int] | None = None
        while True:
            assert await self.settled(), (self.prefill.guard.counts(), self.decode.guard.counts())
            await self.until(lambda: all(e.facts().waiting + e.facts().running == 0 for e in engines), "idle")
            before = [e.facts().steps for e in engines]
            first = first or before
            await asyncio.sleep(0.1)
            steps = [e.facts().steps for e in engines]
            assert sum(steps) - sum(first) <= LATE_STEPS, "somebody computes for nobody"
            if steps == before:
                break
        assert not len(self.prefill_engine.core.leases)
        assert not self.prefill_engine._sinks
        assert not self.decode.engine._live  # type: ignore[union-attr] # decode's
        for engine in engines:
            assert engine.loop.surprises == 0


@asynccontextmanager
async def cluster(subject: Subject, **flags: object):
    """A cluster that is at its baseline when it is left."""
    lab = EdgeLab(subject, **{key.replace("__", "."): value for key, value in flags.items()})
    try:
        await lab.start()
        yield lab
        await lab.require_quiet()
    finally:
        await lab.stop()


async def require_served(lab: EdgeLab) -> None:
    """Whatever happened, the next request is right."""
    prompt = lab.subject.prompt("after", 70)
    seen = await lab.see(prompt, max_tokens=20, ignore_eos=True)
    assert seen.error is None
    assert seen.tokens() == [t.token_id for t in lab.wanted(prompt, max_tokens=20, ignore_eos=True)]


class Neighbour:
    """A healthy request that runs all the while."""

    def __init__(self, lab: EdgeLab) -> None:
        self._lab = lab
        self._prompt = lab.subject.prompt("neighbour", 70)

    async def __aenter__(self) -> Neighbour:
        call = self._lab.call(self._prompt, max_tokens=200, ignore_eos=True)
        self._task = asyncio.create_task(self._lab.read(call))
        await self._lab.until(lambda: self._lab.decode_pages(self._prompt)[0], "the neighbour runs")
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        seen = await self._task
        if kind is None:
            assert seen.error is None
            wanted = self._lab.wanted(self._prompt, max_tokens=200, ignore_eos=True)
            assert seen.tokens() == [t.token_id for t in wanted]
