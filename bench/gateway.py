"""What the gateway costs a streamed token: N streams through one gateway process, beside a bare hand-through.

A scripted decode worker in a process of its own runs steps at a fixed pace: each step gives every stream its next
token, and all of them leave as one message, as those of a real decode worker do. The gateway is the one that serves:
admission, routing, token counts, detokenizing, every check on the stream. The peer takes the same messages apart and
writes a message that it made beforehand to each client: what gRPC for asyncio costs by itself. Each front is pinned to
one core, which client and worker keep off where there is another, and its processor time is what counts, so that other
work on the host blurs the figures less.

    genlock bench gateway
    genlock bench gateway --streams 256 --rate 30000 --json
"""

from __future__ import annotations

import asyncio
import itertools
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
from cluster.gateway.sessions import DecodeSession
from cluster.launch.served import load_served
from cluster.roles import Role
from genlock.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from kvstore.errors import Unavailable
from wire.options import channel_options, server_options

STREAMS = (64, 256)
RATES = (20_000,)
MAX_STREAMS = 4096
PROMPT_TOKENS = 16
SESSION = "/genlock.v1.DecodeService/Session"
GENERATE = "/genlock.v1.InferenceService/Generate"
GATEWAY, PASS, WORKERS = "gateway", "pass", "workers"
READY_MS = 30_000.0
MIN_PAUSE_S = 0.0002


@dataclass(frozen=True)
class FrontRow:
    """One front under one load. Throughputs are tokens that reached the client, each second."""

    front: str  # "gateway", or "pass": the hand-through
    streams: int
    offered_tokens_per_s: int  # what the steps' pace amounts to
    tokens: int
    tokens_per_s: float  # over the time from the first call to the last end, on this host as it is
    core_share: float  # the front's processor time over that time
    tokens_per_core_s: float  # over its processor time: what one core gives when nothing else runs on it
    core_us_per_token: float
    tokens_per_message: float  # of messages to the client; above 1 when the front or the client falls behind


# --- scripted workers ----------------------------------------------------------------------------------------------


class _Scripted(worker_pb2_grpc.WorkerServiceServicer):
    """One worker of either role that is always ready."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self._status = worker_pb2.WorkerStatus(worker_id=worker_id, role=role.value, layout_fingerprint="bench")

    async def Status(self, request: worker_pb2.WorkerStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return self._status

    async def Leases(self, request: worker_pb2.WorkerLeasesRequest, context: Any) -> worker_pb2.WorkerLeases:
        return worker_pb2.WorkerLeases()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse(drained=True)


class _Steps(worker_pb2_grpc.DecodeServiceServicer):
    """Answers with `max_tokens` tokens of the prompt, a token of every request each `step_s`."""

    def __init__(self) -> None:
        self.step_s = 1.0

    async def Session(self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Any) -> None:  # type: ignore[override] # grpc.aio also takes coroutines
        open_calls: dict[int, tuple[list[int], int]] = {}
        stepping = asyncio.create_task(self._step(open_calls, context))
        try:
            async for command in commands:
                if command.HasField("submit"):
                    ticket = command.submit.ticket
                    open_calls[command.call_no] = list(ticket.token_ids), ticket.sampling.max_tokens
                else:
                    open_calls.pop(command.call_no, None)
        finally:
            stepping.cancel()

    async def CheckPeer(self, request: worker_pb2.CheckPeerRequest, context: Any) -> worker_pb2.CheckPeerResponse:
        return worker_pb2.CheckPeerResponse()

    async def _step(self, open_calls: dict[int, tuple[list[int], int]], context: Any) -> None:
        done: dict[int, int] = {}
        due_s = time.perf_counter()
        while True:
            # Like a real worker's: steps go on at their pace, and what they gave since the last message leaves as one.
            now_s = time.perf_counter()
            steps = int((now_s - due_s) / self.step_s) if open_calls else 0
            if not steps:
                due_s = due_s if open_calls else now_s
                await asyncio.sleep(max(due_s + self.step_s - now_s, MIN_PAUSE_S))
                continue
            due_s += steps * self.step_s
            await context.write(_step_message(open_calls, done, steps))


def _step_message(
    open_calls: dict[int, tuple[list[int], int]], done: dict[int, int], steps: int
) -> worker_pb2.DecodeEvents:
    """The next tokens of every request, at most one a step, and the ends of those that have all."""
    message = worker_pb2.DecodeEvents()
    for call_no, (ids, wanted) in list(open_calls.items()):
        at = done.get(call_no, 0)
        upto = done[call_no] = min(at + steps, wanted)
        message.call_nos.extend([call_no] * (upto - at))
        message.token_ids.extend(ids[place % len(ids)] for place in range(at, upto))
        if at == wanted:
            del open_calls[call_no], done[call_no]
            finished = message.events.add(call_no=call_no).finished
            finished.finish_reason = inference_pb2.FINISH_REASON_LENGTH
            finished.completion_tokens = wanted
    return message


def _bytes_method(channel: grpc.aio.Channel, path: str) -> Callable[..., AsyncIterator[bytes]]:
    opened: Any = channel  # its stubs demand serializers, which bytes do not need
    method: Callable[..., AsyncIterator[bytes]] = opened.unary_stream(path)
    return method


async def _serve_workers() -> None:
    servers, told, steps = [], {}, _Steps()
    for role in (Role.DECODE, Role.PREFILL):
        server = grpc.aio.server(options=server_options())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Scripted(f"{role.value}-0", role), server)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(steps, server)
        told[role.value] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)

    def pace(line: str) -> None:
        steps.step_s = float(line)

    await _until_stdin_ends(told, pace)
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
        stub = worker_pb2_grpc.DecodeServiceStub(channel)
        session = DecodeSession(lambda: stub.Session(None), itertools.count(1))

        async def forward(data: bytes, context: Any) -> None:
            made = inference_pb2.GenerateResponse(text=" token", token_ids=[1], server_id="0" * 16).SerializeToString()
            call, finished = session.submit(worker_pb2.DecodeRequest.FromString(data)), None
            while finished is None:
                tokens, finished = await call.next()
                if tokens:
                    await context.write(made)
            last = inference_pb2.GenerateResponse()
            last.finished.usage.completion_tokens = finished.completion_tokens
            await context.write(last.SerializeToString())

        server = grpc.aio.server(options=server_options())
        service, method = GENERATE[1:].split("/")
        handler: Any = grpc.unary_stream_rpc_method_handler(forward)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await _until_stdin_ends({"endpoint": f"127.0.0.1:{port}"})
        await session.close()
        await server.stop(0)


async def _until_stdin_ends(told: dict[str, str], on_line: Callable[[str], None] = lambda line: None) -> None:
    """Tells the parent where this part is, on one line, and stays while the parent does."""
    print(json.dumps(told), flush=True)
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        on_line(line)


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


@contextmanager
def _cores() -> Iterator[int]:
    """The core of the fronts, which this process and those that it starts keep off where there is another."""
    every = os.sched_getaffinity(0)
    front = max(every)
    os.sched_setaffinity(0, every - {front} or every)
    try:
        yield front
    finally:
        os.sched_setaffinity(0, every)


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


async def _load(front: str, endpoint: str, pid: int, streams: int, tokens: int) -> tuple[float, float, int]:
    """Seconds, processor seconds of the front, and messages, of `streams` answers at once."""
    async with grpc.aio.insecure_channel(endpoint, options=channel_options()) as channel:
        method = _bytes_method(channel, GENERATE)

        async def one(seed: int, count: int) -> int:
            messages, last = 0, b""
            async for message in method(_ask(front, count, seed), timeout=600):
                messages, last = messages + 1, message
            if inference_pb2.GenerateResponse.FromString(last).finished.usage.completion_tokens != count:
                raise Unavailable("tokens_lost", f"an answer of {count} tokens through {front} came incomplete")
            return messages - 1  # without the end

        await asyncio.gather(*(one(seed, 8) for seed in range(8)))
        begin, cpu_s = time.perf_counter(), _cpu_s(pid)
        messages = sum(await asyncio.gather(*(one(seed, tokens) for seed in range(streams))))
        return time.perf_counter() - begin, _cpu_s(pid) - cpu_s, messages


def _row(front: str, streams: int, rate: int, tokens: int, took: tuple[float, float, int]) -> FrontRow:
    wall_s, cpu_s, messages = took
    cpu_s = max(cpu_s, 0.01)
    return FrontRow(
        front=front,
        streams=streams,
        offered_tokens_per_s=rate,
        tokens=tokens,
        tokens_per_s=round(tokens / wall_s),
        core_share=round(cpu_s / wall_s, 3),
        tokens_per_core_s=round(tokens / cpu_s),
        core_us_per_token=round(cpu_s * 1e6 / tokens, 1),
        tokens_per_message=round(tokens / max(1, messages), 2),
    )


def run(
    streams: Sequence[int] = STREAMS,
    rates: Sequence[int] = RATES,
    seconds: float = 5.0,
    model: str = "smollm2",
    report: Callable[[str], None] = lambda line: None,
) -> list[FrontRow]:
    """Every load on the gateway and on the peer, one after the other, about `seconds` each."""
    rows = []
    with ExitStack() as parts:
        core = parts.enter_context(_cores())
        workers, endpoints = parts.enter_context(_part(WORKERS))
        arguments = ("--endpoints", json.dumps(endpoints), "--model", model, "--core", str(core))
        fronts = {name: parts.enter_context(_part(name, *arguments)) for name in (GATEWAY, PASS)}
        for rate in rates:
            for many in streams:
                assert workers.stdin is not None
                workers.stdin.write(f"{many / rate}\n")
                workers.stdin.flush()
                each = max(1, round(rate * seconds / many))
                for name, (process, told) in fronts.items():
                    report(f"{name}: {many} streams, {rate} tokens/s")
                    took = asyncio.run(_load(name, told["endpoint"], process.pid, many, each))
                    rows.append(_row(name, many, rate, each * many, took))
    return rows


@click.command(
    epilog="""\b
Examples:
  genlock bench gateway
  genlock bench gateway --streams 256 --rate 10000 --rate 20000 --rate 40000
  genlock bench gateway --json"""
)
@click.option("--streams", multiple=True, type=click.IntRange(1, MAX_STREAMS), default=STREAMS, show_default=True,
              help="Answers at once; may repeat.")  # fmt: skip
@click.option("--rate", "rates", multiple=True, type=click.IntRange(1, 10_000_000), default=RATES, show_default=True,
              help="Tokens a second that decode offers, all streams together; may repeat.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.01, 3600), default=5.0, show_default=True, help="For each load.")
@click.option("--model", default="smollm2", show_default=True, help="Whose tokenizer makes text of them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--part", hidden=True, type=click.Choice((GATEWAY, PASS, WORKERS)))
@click.option("--endpoints", hidden=True, default="{}")
@click.option("--core", hidden=True, type=int, default=0)
def command(
    streams: tuple[int, ...], rates: tuple[int, ...], seconds: float, model: str, as_json: bool, part: str | None,
    endpoints: str, core: int,
) -> int:  # fmt: skip
    """Measures streamed tokens through one gateway on one core, beside a bare hand-through."""
    if part is not None:
        _run_part(part, json.loads(endpoints), model, core)
        return 0
    rows = run(streams, rates, seconds, model, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    click.echo("front    streams  offered/s  tokens/s  core share  tokens/s of one core  core us/token  tokens/message")
    for row in rows:
        click.echo(
            f"{row.front:7s}  {row.streams:7d}  {row.offered_tokens_per_s:9d}  {row.tokens_per_s:8.0f}"
            f"  {row.core_share:10.2f}  {row.tokens_per_core_s:20.0f}  {row.core_us_per_token:13.1f}"
            f"  {row.tokens_per_message:14.2f}"
        )
    return 0


def _run_part(part: str, endpoints: dict[str, str], model: str, core: int) -> None:
    if part == WORKERS:
        asyncio.run(_serve_workers())
        return
    os.sched_setaffinity(0, {core})
    asyncio.run(_serve_gateway(endpoints, model) if part == GATEWAY else _serve_pass(endpoints))


if __name__ == "__main__":
    sys.exit(command(standalone_mode=False))
