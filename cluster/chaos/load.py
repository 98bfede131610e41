"""The clients of a chaos run: open loop, each stream followed to its end or past its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from cluster.chaos.plan import Ask, Behaviour
from cluster.chaos.verdict import Seen
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc
from wire.errors import from_rpc
from wire.options import open_channel

HUNG_MARGIN_S = 1.0
ABORT_TIMEOUT_S = 5.0
LAG_POLL_S = 0.1


@dataclass
class _Stream:
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    left: bool = False


class Crowd:
    """Sends requests to one gateway endpoint. Only the server ends a stream at its deadline: the clients wait longer,
    so that one which never ends is seen."""

    def __init__(self, endpoint: str, prompts: Sequence[Sequence[int]], deadline_s: float) -> None:
        self._channel = open_channel(endpoint)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._prompts = prompts
        self._deadline_s = deadline_s
        self.lag_s = 0.0

    async def close(self) -> None:
        await self._channel.close(None)

    async def run(self, asks: Sequence[Ask], on_sent: Callable[[], None], on_end: Callable[[Ask, Seen], None]) -> None:
        """Returns when every stream has its end, or is given up as hung."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        lag = asyncio.create_task(self._measure_lag())
        streams: list[asyncio.Task[None]] = []

        async def follow(ask: Ask) -> None:
            on_end(ask, await self.one(ask))

        try:
            for ask in asks:
                await asyncio.sleep(max(0.0, begin + ask.at_ms / 1000 - loop.time()))
                on_sent()
                streams.append(asyncio.create_task(follow(ask)))
            await asyncio.gather(*streams)
        finally:
            lag.cancel()

    async def one(self, ask: Ask) -> Seen:
        """One stream, whatever becomes of it; never raises for what the cluster answers."""
        params = pb.SamplingParams(max_tokens=ask.answer_tokens, ignore_eos=True)
        request = pb.GenerateRequest(
            request_id=ask.label,
            tokens=pb.TokenPrompt(token_ids=self._prompts[ask.prompt_no]),
            sampling_params=params,
        )
        impatient = ask.behaviour is Behaviour.IMPATIENT
        call = self._stub.Generate(request, timeout=ask.act_ms / 1000 if impatient else None)
        stream = _Stream()
        leaving = asyncio.create_task(self._leave(ask, call, stream))
        reading = asyncio.create_task(self._read(ask, call, stream))
        try:
            if not await self._ends(reading, self._deadline_s + self._pauses_s(ask)):
                return Seen(tuple(stream.tokens), hung=True)
            reading.result()
        except grpc.aio.AioRpcError as error:
            return Seen(tuple(stream.tokens), error=from_rpc(error), left=stream.left)
        except asyncio.CancelledError:
            if not stream.left:
                raise
            return Seen(tuple(stream.tokens), left=True)
        finally:
            leaving.cancel()
            reading.cancel()
            call.cancel()
        return Seen(tuple(stream.tokens), finished=stream.finished, left=stream.left)

    async def _ends(self, reading: asyncio.Task[None], limit_s: float) -> bool:
        """Whether the stream ends within the limit and the margin. The gateway's timers are of this process, too: by as
        much as the process itself was late, they may be."""
        if (await asyncio.wait({reading}, timeout=limit_s + HUNG_MARGIN_S))[0]:
            return True
        await asyncio.wait({reading}, timeout=2 * LAG_POLL_S)  # so that a delay which is not over has been measured
        if not reading.done() and self.lag_s > LAG_POLL_S:
            await asyncio.wait({reading}, timeout=self.lag_s)
        return reading.done()

    async def _read(self, ask: Ask, call: grpc.aio.UnaryStreamCall, stream: _Stream) -> None:  # type: ignore[type-arg]  # the class is generic in stubs only
        async for message in call:
            stream.tokens.extend(message.token_ids)
            stream.finished = stream.finished or message.HasField("finished")
            if ask.behaviour is Behaviour.SLOW:
                await asyncio.sleep(ask.act_ms / 1000)

    def _pauses_s(self, ask: Ask) -> float:
        """What a slow client adds by itself: messages that came in time wait until it has paused often enough."""
        return ask.answer_tokens * ask.act_ms / 1000 if ask.behaviour is Behaviour.SLOW else 0.0

    async def _leave(self, ask: Ask, call: grpc.aio.UnaryStreamCall, stream: _Stream) -> None:  # type: ignore[type-arg]  # the class is generic in stubs only
        if ask.behaviour not in (Behaviour.LEAVES, Behaviour.ABORTS):
            return
        await asyncio.sleep(ask.act_ms / 1000)
        stream.left = True
        if ask.behaviour is Behaviour.LEAVES:
            call.cancel()
            return
        with contextlib.suppress(grpc.aio.AioRpcError):  # a gateway that is down has no request to abort
            await self._stub.Abort(pb.AbortRequest(request_id=ask.label), timeout=ABORT_TIMEOUT_S)

    async def _measure_lag(self) -> None:
        """How late this process is: what is late here is not the cluster's."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_POLL_S
            await asyncio.sleep(LAG_POLL_S)
            self.lag_s = max(self.lag_s, loop.time() - due)
