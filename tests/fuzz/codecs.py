"""Borders where bytes of others become values: tickets, pools, descriptors, headers, errors, requests, bodies."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc
import numpy as np

from cluster.gateway.admission import ModelLimits, check_request, fit_sampling
from cluster.openai.fields import parse_object
from cluster.openai.requests import Kind, read_ask
from cluster.settings import ApiConfig
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.digest import Digester
from kvstore.errors import GenlockError, NoCapacity
from kvstore.header import PageHeader, unpack_header
from kvstore.ids import Tag
from kvstore.layout import layout_from_canonical
from kvstore.transfer import mooncake, nixl_address, shm
from kvstore.transfer.base import PoolExport
from kvstore.transfer.shm import ShmEngine
from model.base import ModelInfo
from model.sampling import SamplingParams
from model.ticket import Ticket
from tests.fuzz.layer import Finding, Layer, typed
from tests.fuzz.mutate import mutated, mutated_object, text
from tests.support.kv_world import LAYOUT
from wire.convert import descriptor_from_proto, export_from_proto, served_ticket, ticket_to_proto, token_from_proto
from wire.errors import from_rpc, to_status

INFO = ModelInfo("probe", "rev", "tok", 300, 512, (256,))
TICKET = ticket_to_proto(Ticket(b"t" * 16, "tenant", tuple(range(40)), SamplingParams(max_tokens=8), "rev", "tok", 1))
EXPORT = worker_pb2.PoolExport(
    engine="shm", incarnation=11, layout=LAYOUT.canonical(), slots=8, slot_bytes=LAYOUT.slot_bytes, address="{}"
)
DESCRIPTOR = worker_pb2.PageDescriptor(
    page_id=1, incarnation=11, generation=3, logical_index=1, first_position=4, valid_rows=4,
    byte_length=LAYOUT.slot_bytes, layout_fingerprint=LAYOUT.fingerprint, prefix_key=b"k" * 32, digest=5,
)  # fmt: skip
TOKEN = worker_pb2.SampledToken(token_id=4, logprob=-1.0, top=[worker_pb2.SampledLogprob(token_id=4, logprob=-1.0)])
REQUEST = pb.GenerateRequest(
    request_id="label", text="a prompt", model="probe",
    sampling_params=pb.SamplingParams(temperature=1.0, top_p=0.5, max_tokens=9, stop=["x"], stop_token_ids=[3], n=2),
)  # fmt: skip
CHAT = pb.GenerateRequest(
    chat=pb.ChatPrompt(messages=[
        pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant", tool_calls=['{"a": [{}]}'])
    ]),
    sampling_params=pb.SamplingParams(json_schema='{"items": {"type": "string"}}'),
)  # fmt: skip
BODY = {
    "model": "m", "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    ], "prompt": "hi", "stream": True, "n": 2,
    "stop": ["a"], "temperature": 0.5, "seed": 3, "max_tokens": 9, "logprobs": 1, "top_logprobs": 1,
    "stream_options": {},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": [1]}}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}  # fmt: skip
MODEL, API = ModelLimits("probe", 300, 512), ApiConfig(max_prompt_bytes=4096)


@dataclass
class Pure:
    """Cases without state: `run` gets a generator of its own for each."""

    seed: int
    name: str
    run: Callable[[random.Random], str]

    def case(self, number: int) -> str:
        return self.run(random.Random(f"{self.seed}/{self.name}/{number}"))

    def close(self) -> None:
        return None


def tickets(rng: random.Random) -> str:
    message = mutated(rng, TICKET)
    if message is None:
        return "unparsed"

    def judge() -> None:
        ticket = served_ticket(message, INFO)
        if not all(0 <= t < INFO.vocab_size for t in ticket.token_ids) or len(ticket.ticket_id) != 16:
            raise Finding("a ticket passed that no model can serve")
        if (
            ticket.model_revision != "rev"
            or len(ticket.token_ids) + ticket.sampling.max_tokens > INFO.context_tokens + 1
        ):
            raise Finding("a ticket passed that is for another model or over the context")

    return typed(judge)


def exports(rng: random.Random) -> str:
    message = mutated(rng, EXPORT)
    if message is None:
        return "unparsed"
    if rng.random() < 0.5:
        message.layout = mutated_object(rng, json.loads(LAYOUT.canonical()))

    def judge() -> None:
        export = export_from_proto(message)
        layout = layout_from_canonical(export.layout)
        if layout.canonical() != layout_from_canonical(layout.canonical()).canonical():
            raise Finding("a layout has two texts")

    return typed(judge)


def descriptors(rng: random.Random) -> str:
    message, token = mutated(rng, DESCRIPTOR), mutated(rng, TOKEN)
    if token is not None:
        typed(lambda: token_from_proto(token))
    return "unparsed" if message is None else typed(lambda: descriptor_from_proto(message))


GOOD_HEADER = PageHeader(Tag(11, 3), LAYOUT.fingerprint, 4, 4, b"k" * 32)


def headers(rng: random.Random) -> str:
    raw = bytearray(GOOD_HEADER.pack())
    for _ in range(rng.choice((0, 1, 2, 9))):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    del raw[rng.choice((len(raw), len(raw), rng.randrange(len(raw)))) :]
    found: list[PageHeader | None] = []
    outcome = typed(lambda: found.append(unpack_header(bytes(raw))))
    if found and found[0] == GOOD_HEADER and bytes(raw) != GOOD_HEADER.pack():
        raise Finding("altered bytes are the same header")
    return "no header" if found == [None] else outcome


class _Failed(grpc.RpcError):
    """What a call to a hostile peer raises."""

    def __init__(self, code: grpc.StatusCode, trailers: tuple[tuple[str, bytes], ...]) -> None:
        self._code, self._trailers = code, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "text of the peer"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailers


def errors(rng: random.Random) -> str:
    status = mutated(rng, to_status(NoCapacity("full", "no room", field="x", retry_after_ms=5)))
    raw = rng.randbytes(rng.randrange(60)) if status is None else status.SerializeToString()
    code = rng.choice(list(grpc.StatusCode)[1:])
    if status is not None and rng.random() < 0.5:
        code = next((c for c in grpc.StatusCode if c.value[0] == status.code), code)
    got: list[GenlockError] = []
    typed(lambda: got.append(from_rpc(_Failed(code, (("grpc-status-details-bin", raw),)))))
    return got[0].status


def requests(rng: random.Random) -> str:
    message = mutated(rng, rng.choice((REQUEST, CHAT)))
    if message is None:
        return "unparsed"

    def judge() -> None:
        draft = check_request(message, MODEL, API)
        sampling = fit_sampling(draft, 10, MODEL)
        if not (0 < draft.choices <= 128 and 0 < sampling.max_tokens <= MODEL.context_tokens):
            raise Finding("a request passed that is over the limits")

    return typed(judge)


def bodies(rng: random.Random) -> str:
    raw = mutated_object(rng, BODY).encode("utf-8", "surrogatepass")
    if raw and rng.random() < 0.1:
        raw = bytearray(raw)
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        raw = bytes(raw)

    def judge() -> None:
        ask = read_ask(rng.choice(list(Kind)), parse_object(raw), "label")
        check_request(ask.request, MODEL, API)

    return typed(judge)


ADDRESSES: dict[str, tuple[Callable[[str], object], dict[str, object]]] = {
    "shm": (shm.parse_address, {
        "pid": 1, "fd": 3, "start_ticks": 5, "pid_namespace": "pid:[4026531836]", "boot_id": "x", "nonce": "ab" * 16,
    }),
    "mooncake": (mooncake.parse_address, {"session": "127.0.0.1:1234", "protocol": "tcp", "base": 4096}),
    "nixl": (nixl_address.parse_address, {
        "agent": "a", "base": 4096, "nonce": "ab" * 16, "metadata": "YQ==", "sum": "00", "transport": "auto",
    }),
}  # fmt: skip


def addresses(rng: random.Random) -> str:
    name = rng.choice(list(ADDRESSES))
    parse, good = ADDRESSES[name]
    raw = mutated_object(rng, good) if rng.random() < 0.9 else text(rng)
    return f"{name}: {typed(lambda: parse(raw))}"


class Connects:
    """A real engine that is told to connect to pools which are not there, not those, or not pools."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._source, self._reader = (_pool(i) for i in (71, 72))
        self._good = self._source.export
        self._fds = _open_files()

    def case(self, number: int) -> str:
        rng = random.Random(f"{self._seed}/connect/{number}")
        good = self._good
        export = PoolExport(good.engine, good.incarnation, good.layout, good.slots, good.slot_bytes, good.address)
        which = rng.randrange(4)
        if which == 0:
            export = replace(export, address=mutated_object(rng, json.loads(good.address)))
        elif which == 1:
            export = replace(export, slots=rng.choice((0, 1, 7, 9, 1 << 20, (1 << 31) - 1)))
        elif which == 2:
            export = replace(export, slot_bytes=rng.choice((0, -1, 63, 64, 192, 256, 1 << 40, (1 << 63) - 1)))
        else:
            export = replace(
                export, incarnation=rng.choice((1, 70, (1 << 63) - 1)), engine=rng.choice(("shm", "nixl", ""))
            )

        def connect() -> None:
            peer = self._reader.engine.connect(export)
            self._reader.engine.disconnect(peer)
            if export != good and json.loads(export.address) != json.loads(good.address):
                raise Finding("connected to an address that is not the pool's")

        return typed(connect)

    def close(self) -> None:
        peer = self._reader.engine.connect(self._good)
        if not np.array_equal(self._reader.engine.read_tags(peer, 1000)[:, 0], np.full(8, 71)):
            raise Finding("the pool is not what it was")
        self._reader.engine.disconnect(peer)
        if _open_files() > self._fds:
            raise Finding(f"{_open_files() - self._fds} files stay open")
        for pool in (self._source, self._reader):
            pool.engine.close()


@dataclass
class _Pool:
    engine: ShmEngine
    export: PoolExport


def _pool(incarnation: int) -> _Pool:
    engine = ShmEngine(Digester(b"a secret of the fuzzer", LAYOUT.slot_bytes))
    engine.allocate(8, LAYOUT.slot_bytes)
    return _Pool(engine, engine.publish(incarnation, LAYOUT.canonical()))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _pure(name: str, share: int, run: Callable[[random.Random], str]) -> Layer:
    return Layer(name, share, lambda seed: Pure(seed, name, run))


LAYERS = (
    _pure("tickets", 17_500, tickets),
    _pure("exports and layouts", 14_000, exports),
    _pure("descriptors and tokens", 12_000, descriptors),
    _pure("page headers", 8_000, headers),
    _pure("errors of peers", 8_000, errors),
    _pure("requests", 12_000, requests),
    _pure("HTTP bodies", 10_000, bodies),
    _pure("pool addresses", 6_000, addresses),
    Layer("connects", 2_000, Connects),
)
