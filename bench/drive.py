"""Sends a load and takes the times: one stop-watch for every system, whatever it speaks.

asks ─► at its arrival: gate (concurrency limit) ─► system.ask ─► chunks, timed as they come ─► Sample
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from bench.load import Ask, Sample, ServerTimes
from cluster.cli.client import Client
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import DeadlineExceeded, GenlockError, InvalidInput, Unavailable
from kvstore.json_text import parse_json

MAX_LINE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Chunk:
    """Tokens that came at once; `server` and `total_tokens` with the last one, where the system tells them."""

    tokens: int
    server: ServerTimes | None = None
    total_tokens: int | None = None


class System(Protocol):
    """Something that answers. Raises GenlockError for every failure."""

    def ask(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Chunk, None]: ...


@dataclass(frozen=True)
class Limits:
    concurrency: int = 64
    request_s: float = 120.0
    run_s: float = 600.0


async def drive(
    system: System,
    asks: Sequence[Ask],
    limits: Limits,
    samples: list[Sample],
    on_sample: Callable[[Sample], None] = lambda _sample: None,
    clock_s: Callable[[], float] = time.perf_counter,
) -> None:
    """Runs the load; one sample for each request is in `samples` at the end, also when the run is cancelled.

    Requests in flight when `run_s` is over end as `run_time_limit`, at a cancellation as `interrupted`.
    """
    try:
        async with asyncio.timeout(limits.run_s) as limit:
            await _Run(system, limits, samples, on_sample, clock_s, limit.expired).send(asks)
    except TimeoutError:
        if not limit.expired():
            raise


class _Run:
    def __init__(
        self,
        system: System,
        limits: Limits,
        samples: list[Sample],
        on_sample: Callable[[Sample], None],
        clock_s: Callable[[], float],
        expired: Callable[[], bool],
    ) -> None:
        self._expired = expired
        self._system = system
        self._limits = limits
        self._samples = samples
        self._on_sample = on_sample
        self._clock_s = clock_s
        self._gate = asyncio.Semaphore(limits.concurrency)
        self._start_s = clock_s()

    def _now_s(self) -> float:
        return self._clock_s() - self._start_s

    async def send(self, asks: Sequence[Ask]) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            for ask in asks:
                await asyncio.sleep(max(0.0, ask.at_s - self._now_s()))
                tasks.append(asyncio.create_task(self._one(ask)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Those that never came to run, scheduled or not.
            seen = {sample.ask.number for sample in self._samples}
            self._samples.extend(Sample(ask) for ask in asks if ask.number not in seen)

    async def _one(self, ask: Ask) -> None:
        sample = Sample(ask)
        try:
            async with self._gate:
                sample = replace(sample, sent_s=self._now_s())
                try:
                    async for grown in self._watched(sample):
                        sample = grown
                except GenlockError as error:
                    sample = replace(sample, error=error.reason)
                except asyncio.CancelledError:
                    sample = replace(sample, error="run_time_limit" if self._expired() else "interrupted")
                    raise
                finally:
                    sample = replace(sample, ended_s=self._now_s())
        finally:
            self._samples.append(sample)
            self._on_sample(sample)

    async def _watched(self, sample: Sample) -> AsyncIterator[Sample]:
        """The sample as it grows."""
        seen = 0
        async with aclosing(self._system.ask(sample.ask, self._limits.request_s)) as chunks:
            async for chunk in chunks:
                if chunk.tokens:
                    now_s = self._now_s()
                    seen += chunk.tokens
                    gaps = () if sample.last_s is None else (now_s - sample.last_s,)
                    first_s = now_s if sample.first_s is None else sample.first_s
                    sample = replace(
                        sample, first_s=first_s, last_s=now_s, gaps_s=sample.gaps_s + gaps, tokens=seen
                    )  # fmt: skip
                if chunk.total_tokens is not None:
                    sample = replace(sample, tokens=chunk.total_tokens, server=chunk.server)
                yield sample
        if not seen:
            raise Unavailable("empty_answer", "the answer has no tokens")


class GenlockSystem:
    """A Genlock gateway, over gRPC."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def ask(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Chunk, None]:
        request = pb.GenerateRequest(
            request_id=f"bench-{ask.number}",
            tokens=pb.TokenPrompt(token_ids=ask.token_ids),
            sampling_params=pb.SamplingParams(max_tokens=ask.answer_tokens, ignore_eos=True, seed=ask.number),
            stream=True,
        )
        client = replace(self._client, timeout_s=timeout_s)
        tokens, finished = 0, False
        async for message in client.generate(request):
            tokens += len(message.token_ids)
            if not message.HasField("finished"):
                yield Chunk(len(message.token_ids))
                continue
            finished = True
            times, usage = message.finished.timings, message.finished.usage
            server = ServerTimes(
                times.queue_ms, times.prefill_ms, times.transfer_ms, times.first_token_ms, times.total_ms,
                usage.cached_tokens,
            )  # fmt: skip
            yield Chunk(len(message.token_ids), server, usage.completion_tokens)
        if not finished:
            raise Unavailable("stream_cut", "the stream ended without a `finished` message")
        if tokens != ask.answer_tokens:
            raise Unavailable("short_answer", f"{tokens} tokens came, {ask.answer_tokens} were asked for")


class OpenAiSystem:
    """Any server with OpenAI's `/v1/completions`, streaming, prompts as token ids. One connection for each request.

    It must serve the same model as the cluster for the figures to be comparable. `ignore_eos` is known to most such
    servers and ignored by others, whose answers may then be shorter; tokens are those that the server counts.
    """

    def __init__(self, url: str, model: str, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self.model = model
        self._token = token

    @classmethod
    async def find(cls, url: str, token: str | None = None) -> OpenAiSystem:
        """Asks `/models` for the first model's name. Raises Unavailable or InvalidInput."""
        found = cls(url, "", token)
        async with found._answer("GET", "/models", None, CONNECT_TIMEOUT_S) as lines:
            text = b"".join([line async for line in lines])
        try:
            return cls(url, str(json.loads(text)["data"][0]["id"]), token)
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable("peer_protocol", f"{place_of(url)} does not list its models") from error

    async def ask(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Chunk, None]:
        body = {
            "model": self.model, "prompt": list(ask.token_ids), "max_tokens": ask.answer_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        done = False
        async with self._answer("POST", "/completions", body, timeout_s) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    break
                event = _event(data)
                usage, choices = event.get("usage"), event.get("choices") or []
                ends = any(choice.get("finish_reason") for choice in choices)
                # A token whose character is not whole yet comes as an empty text; the last message may bring none.
                fresh = any(choice.get("text") or not ends for choice in choices)
                done = done or ends
                total = usage.get("completion_tokens") if isinstance(usage, dict) else None
                if fresh or total:
                    yield Chunk(int(fresh), total_tokens=int(total) if total else None)
        if not done:
            raise Unavailable("stream_cut", "the stream ended before the answer was complete")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Sends one HTTP/1.1 request and gives the lines of its answer's body."""
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput("bad_peer", f"{self._url!r} must read http://HOST:PORT/v1", field="--peer")
        payload = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        head += ["Connection: close", "Content-Type: application/json", f"Content-Length: {len(payload)}"]
        head += [f"Authorization: Bearer {self._token}"] if self._token else []
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                port = parts.port or (443 if secure else 80)
                reader, writer = await asyncio.open_connection(
                    parts.hostname, port, ssl=secure or None, limit=MAX_LINE_BYTES
                )
                writer.write("\r\n".join([*head, "", ""]).encode() + payload)
                await writer.drain()
                yield _lines(reader, await _chunked(reader))
        except TimeoutError as error:
            raise DeadlineExceeded("deadline_exceeded", f"no whole answer within {timeout_s:g} s") from error
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise Unavailable("peer_unreachable", f"{place_of(self._url)}: {type(error).__name__}") from error
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1):
                        await writer.wait_closed()


async def _chunked(reader: asyncio.StreamReader) -> bool:
    """Reads status and headers. Raises Unavailable unless the status is 200."""
    status = (await reader.readline()).split()
    chunked = False
    while (line := await reader.readline()).strip():
        name, _, value = line.lower().partition(b":")
        chunked = chunked or (name == b"transfer-encoding" and b"chunked" in value)
    if len(status) < 2 or status[1] != b"200":
        code = status[1].decode("ascii", "replace")[:3] if len(status) > 1 else "none"
        raise Unavailable(f"http_{code}", f"the server answered HTTP status {code}")
    return chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body, line by line, the last one perhaps without its end."""
    held = b""
    async for piece in _pieces(reader, chunked):
        held += piece
        *whole, held = held.split(b"\n")
        for line in whole:
            yield line
        if len(held) > MAX_LINE_BYTES:
            raise ValueError("line too long")
    if held:
        yield held


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        if size > MAX_LINE_BYTES:
            raise ValueError("chunk too long")
        yield await reader.readexactly(size)
        await reader.readexactly(2)


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = parse_json(data)
    except ValueError as error:
        raise Unavailable("peer_protocol", "the server sent an event that is no JSON") from error
    if not isinstance(event, dict) or event.get("error"):
        raise Unavailable("peer_error", "the server reported an error in its stream")
    return event


def place_of(url: str) -> str:
    """Host and port alone: a URL may carry a credential."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
