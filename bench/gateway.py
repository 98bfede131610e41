"""What the gateway costs a streamed token: N streams through one gateway process, beside a bare gRPC pass-through.

Scripted workers in a process of their own stream answers as fast as they are taken, a few tokens in each message, as
decode workers do whose steps are coalesced under load. The gateway is the one that serves: admission, routing, token
counts, detokenizing, every check on the stream. The peer forwards the same messages as bytes that it never reads: what
gRPC for asyncio costs by itself. Each front is pinned to one core, and its processor time is what counts, so that other
work on the host blurs the figures less.

    genlock bench gateway
    genlock bench gateway --streams 256 --tokens-per-message 4 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import grpc
import grpc.aio

from cluster.config import load
from cluster.gateway.served import Sources
from cluster.gateway.server import Gateway
from cluster.launch.served import load_served
from cluster.roles import Role
from genlock.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from kvstore.errors import Unavailable
from wire.options import channel_options, server_options

STREAMS = (64, 256)
PER_MESSAGE = (1, 4)
MAX_STREAMS = 4096
PROMPT_TOKENS = 16
DECODE = "/genlock.v1.DecodeService/Decode"
GENERATE = "/genlock.v1.InferenceService/Generate"
GATEWAY, PASS, WORKERS = "gateway", "pass", "workers"
READY_MS = 30_000.0


@dataclass(frozen=True)
class FrontRow:
    """One front under one load. Throughputs are tokens that reached the client, each second."""

    front: str  # "gateway", or "pass": the pass-through
    streams: int
    tokens_per_message: int
    tokens: int
    tokens_per_core_s: float  # over the front's processor time: what one core gives when nothing else runs on it
    tokens_per_s: float  # over the time from the first call to the last end, on this host as it is
    core_us_per_token: float
    core_us_per_message: float
    messages: int  # that reached the client


# --- scripted workers ----------------------------------------------------------------------------------------------


class _Scripted(worker_pb2_grpc.WorkerServiceServicer):
    """One worker of either role that is always ready."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self._status = worker_pb2.WorkerStatus(worker_id=worker_id, role=role.value, layout_fingerprint="bench")

    async def Status(self, request: worker_pb2.WorkerStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return self._status

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse(drained=True)


def _decode_handler(per_message: int) -> Any:
    """Answers with `max_tokens` tokens of the prompt. Messages are made once for each call, not one by one: the script
    must be faster than what it feeds."""

    async def decode(data: bytes, context: Any) -> None:
        ticket = worker_pb2.DecodeRequest.FromString(data).ticket
        tokens = [worker_pb2.SampledToken(token_id=token) for token in ticket.token_ids]
        whole, rest = divmod(ticket.sampling.max_tokens, per_message)

        def event(count: int) -> bytes:
            some = [tokens[at % len(tokens)] for at in range(count)]
            return worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(tokens=some)).SerializeToString()

        message = event(per_message)
        for _ in range(whole):
            await context.write(message)
        if rest:
            await context.write(event(rest))
        finished = worker_pb2.DecodeFinished(
            finish_reason=inference_pb2.FINISH_REASON_LENGTH, completion_tokens=ticket.sampling.max_tokens
        )
        await context.write(worker_pb2.DecodeEvent(finished=finished).SerializeToString())

    return _generic(DECODE, decode)


def _generic(path: str, handler: Callable[[bytes, Any], Any]) -> Any:
    """A handler of bytes."""
    service, method = path[1:].split("/")
    return grpc.method_handlers_generic_handler(service, {method: grpc.unary_stream_rpc_method_handler(handler)})


def _bytes_method(channel: grpc.aio.Channel, path: str) -> Callable[..., AsyncIterator[bytes]]:
    opened: Any = channel  # its stubs demand serializers, which bytes do not need
    method: Callable[..., AsyncIterator[bytes]] = opened.unary_stream(path)
    return method


async def _serve_workers(per_message: int) -> None:
    servers, told = [], {}
    for role in (Role.DECODE, Role.PREFILL):
        server = grpc.aio.server(options=server_options())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Scripted(f"{role.value}-0", role), server)
        server.add_generic_rpc_handlers((_decode_handler(per_message),))
        told[role.value] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    await _until_stdin_ends(told)
    for server in servers:
        await server.stop(0)


# --- fronts ----------------------------------------------------------------------------------------------------------


async def _serve_gateway(endpoints: dict[str, str], model: str) -> None:
    flags = {
        "model.name": model, "api.port": 0, "api.max_requests": MAX_STREAMS, "workers.max_running": MAX_STREAMS,
    }  # fmt: skip
    config = load(flags=flags).config
    sources = Sources(now_ms=lambda: time.monotonic() * 1000, random_bytes=os.urandom)
    gateway = Gateway(config, await load_served(config), sources)
    endpoint = await gateway.start()
    for role in Role:
        gateway.add_worker(f"{role.value}-0", role, endpoints[role.value])
    await gateway.wait_ready(READY_MS)
    await _until_stdin_ends({"endpoint": endpoint})
    await gateway.stop(0)


async def _serve_pass(endpoints: dict[str, str]) -> None:
    async with grpc.aio.insecure_channel(endpoints[Role.DECODE.value], options=channel_options()) as channel:
        call = _bytes_method(channel, DECODE)

        async def forward(data: bytes, context: Any) -> AsyncIterator[bytes]:
            async for message in call(data):
                yield message

        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((_generic(DECODE, forward),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await _until_stdin_ends({"endpoint": f"127.0.0.1:{port}"})
        await server.stop(0)


async def _until_stdin_ends(told: dict[str, str]) -> None:
    """Tells the parent where this part is, on one line, and stays while the parent does."""
    print(json.dumps(told), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def _part(name: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A process of this module. Raises Unavailable (`worker_died`) when it does not come up."""
    command = [sys.executable, "-m", "bench.gateway", "--part", name, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise Unavailable("worker_died", f"the benchmark's {name} process ended while it started")
            yield process, json.loads(line)
        finally:
            process.stdin.close()


# --- the client ------------------------------------------------------------------------------------------------------


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(front: str, tokens: int, seed: int) -> bytes:
    # Ids that every vocabulary has.
    prompt = [(seed * 31 + at * 7) % 80 + 40 for at in range(PROMPT_TOKENS)]
    if front == PASS:
        sampling = worker_pb2.Sampling(max_tokens=tokens)
        return worker_pb2.DecodeRequest(
            ticket=worker_pb2.Ticket(token_ids=prompt, sampling=sampling)
        ).SerializeToString()
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=prompt),
        sampling_params=inference_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
    ).SerializeToString()


def _told_tokens(front: str, last: bytes) -> int:
    """What a stream's last message says."""
    if front == PASS:
        return worker_pb2.DecodeEvent.FromString(last).finished.completion_tokens
    return inference_pb2.GenerateResponse.FromString(last).finished.usage.completion_tokens


async def _load(front: str, endpoint: str, pid: int, streams: int, tokens: int) -> tuple[float, float, int]:
    """Seconds, processor seconds of the front, and messages, of `streams` answers at once."""
    async with grpc.aio.insecure_channel(endpoint, options=channel_options()) as channel:
        method = _bytes_method(channel, DECODE if front == PASS else GENERATE)

        async def one(seed: int, count: int) -> int:
            messages, last = 0, b""
            async for message in method(_ask(front, count, seed), timeout=600):
                messages, last = messages + 1, message
            if _told_tokens(front, last) != count:
                raise Unavailable("tokens_lost", f"an answer of {count} tokens through {front} came incomplete")
            return messages

        await asyncio.gather(*(one(seed, 8) for seed in range(8)))
        begin, cpu_s = time.perf_counter(), _cpu_s(pid)
        messages = sum(await asyncio.gather(*(one(seed, tokens) for seed in range(streams))))
        return time.perf_counter() - begin, _cpu_s(pid) - cpu_s, messages


def _row(front: str, streams: int, per_message: int, tokens: int, took: tuple[float, float, int]) -> FrontRow:
    wall_s, cpu_s, messages = took
    cpu_s = max(cpu_s, 0.01)
    return FrontRow(
        front=front,
        streams=streams,
        tokens_per_message=per_message,
        tokens=tokens,
        tokens_per_core_s=round(tokens / cpu_s),
        tokens_per_s=round(tokens / wall_s),
        core_us_per_token=round(cpu_s * 1e6 / tokens, 1),
        core_us_per_message=round(cpu_s * 1e6 / messages, 1),
        messages=messages,
    )


def run(
    streams: Sequence[int] = STREAMS,
    per_message: Sequence[int] = PER_MESSAGE,
    tokens: int = 100_000,
    model: str = "smollm2",
    report: Callable[[str], None] = lambda line: None,
) -> list[FrontRow]:
    """Every load on the gateway and on the peer, one after the other; `tokens` in each, all streams together."""
    rows = []
    for count in per_message:
        with ExitStack() as parts:
            _, endpoints = parts.enter_context(_part(WORKERS, "--tokens-per-message", str(count)))
            where = json.dumps(endpoints)
            fronts = {
                name: parts.enter_context(_part(name, "--endpoints", where, "--model", model))
                for name in (GATEWAY, PASS)
            }
            for many in streams:
                each = max(1, tokens // many)
                for name, (process, told) in fronts.items():
                    report(f"{name}: {many} streams, {count} tokens a message")
                    took = asyncio.run(_load(name, told["endpoint"], process.pid, many, each))
                    rows.append(_row(name, many, count, each * many, took))
    return rows


@click.command(
    epilog="""\b
Examples:
  genlock bench gateway
  genlock bench gateway --streams 256 --tokens-per-message 1 --tokens-per-message 8
  genlock bench gateway --json"""
)
@click.option("--streams", multiple=True, type=click.IntRange(1, MAX_STREAMS), default=STREAMS, show_default=True,
              help="Answers at once; may repeat.")  # fmt: skip
@click.option("--tokens-per-message", "per_message", multiple=True, type=click.IntRange(1, 64), default=PER_MESSAGE,
              show_default=True, help="Tokens that a decode worker sends at once; may repeat.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1, 100_000_000), default=100_000, show_default=True,
              help="Tokens of one load, all streams together.")  # fmt: skip
@click.option("--model", default="smollm2", show_default=True, help="Whose tokenizer makes text of them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--part", hidden=True, type=click.Choice((GATEWAY, PASS, WORKERS)))
@click.option("--endpoints", hidden=True, default="{}")
def command(
    streams: tuple[int, ...], per_message: tuple[int, ...], tokens: int, model: str, as_json: bool, part: str | None,
    endpoints: str,
) -> int:  # fmt: skip
    """Measures streamed tokens through one gateway on one core, beside a pass-through that reads nothing."""
    if part is not None:
        _run_part(part, json.loads(endpoints), model, per_message[0])
        return 0
    rows = run(streams, per_message, tokens, model, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    click.echo("front    streams  tokens/message  tokens/s of one core  tokens/s here  core us/token  core us/message")
    for row in rows:
        click.echo(
            f"{row.front:7s}  {row.streams:7d}  {row.tokens_per_message:14d}  {row.tokens_per_core_s:20.0f}"
            f"  {row.tokens_per_s:13.0f}  {row.core_us_per_token:13.1f}  {row.core_us_per_message:15.1f}"
        )
    return 0


def _run_part(part: str, endpoints: dict[str, str], model: str, per_message: int) -> None:
    if part == WORKERS:
        asyncio.run(_serve_workers(per_message))
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    asyncio.run(_serve_gateway(endpoints, model) if part == GATEWAY else _serve_pass(endpoints))


if __name__ == "__main__":
    sys.exit(command(standalone_mode=False))
