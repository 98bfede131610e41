"""A hostile prefill peer, below the network: events of a handoff in any order and shape, descriptors that lie, bytes
that are not what was promised."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

from decode.handoff import Accepted, Completed, HandoffReceiver, HandoffState, PagePromised
from decode.pull import _event
from genlock.v1 import worker_pb2
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.descriptor import PageDescriptor
from kvstore.errors import Cancelled, GenlockError
from kvstore.ids import PageRef, Tag
from kvstore.layout import HEADER_BYTES
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder
from kvstore.transfer.faults import BitFlip, Ending, TransferFaults
from model.sampler import SampledToken
from model.sampling import SamplingParams
from model.ticket import Ticket
from tests.fuzz.layer import Finding, Layer, reason_of
from tests.fuzz.mutate import INTS as ANY_INTS
from tests.fuzz.mutate import mutated
from tests.support.kv_refusals import OTHERS, TOKENS
from tests.support.kv_world import LAYOUT, NEIGHBOUR, OWNER, T, World, body, seal_prompt, slot_bytes_of

INTS = tuple(n for n in ANY_INTS if -(1 << 63) <= n < 1 << 63)  # what the wire can carry
HANDOFF, TICKET_ID = b"h" * 16, b"t" * 16
PAGES = 3
VOCAB = 300
TICKET = Ticket(TICKET_ID, "acme", tuple(range(PAGES * T)), SamplingParams(), "revision", "tokenizer")
WORLD_CASES = 400
# Of the others nothing could be read afterwards; they have tests of their own.
ENDINGS = tuple(ending for ending in Ending if ending not in (Ending.DROP, Ending.PEER_LOSS))


def good_events() -> list[worker_pb2.HandoffEvent]:
    pool = worker_pb2.PoolExport(
        engine="memory", incarnation=11, layout=LAYOUT.canonical(), slots=8, slot_bytes=LAYOUT.slot_bytes, address="x"
    )
    accepted = worker_pb2.HandoffAccepted(pool=pool, ticket_id=TICKET_ID, lease_ms=1000)
    pages = [
        worker_pb2.PageDescriptor(
            page_id=i, incarnation=11, generation=3, logical_index=i, first_position=i * T, valid_rows=T,
            byte_length=LAYOUT.slot_bytes, layout_fingerprint=LAYOUT.fingerprint, prefix_key=bytes([i]) * 32, digest=5,
        )
        for i in range(PAGES)
    ]  # fmt: skip
    done = worker_pb2.HandoffCompleted(page_count=PAGES, first_token=worker_pb2.SampledToken(token_id=7))
    return [
        worker_pb2.HandoffEvent(handoff_id=HANDOFF, accepted=accepted),
        *(worker_pb2.HandoffEvent(handoff_id=HANDOFF, page=page) for page in pages),
        worker_pb2.HandoffEvent(handoff_id=HANDOFF, completed=done),
        worker_pb2.HandoffEvent(handoff_id=HANDOFF, released=worker_pb2.HandoffReleased()),
    ]


class Events:
    """Decode's rules of a handoff, fed with streams that are mixed, repeated, cut and altered."""

    def __init__(self, seed: int, checks: Checks = ALL_CHECKS) -> None:
        self._seed = seed
        self._checks = checks
        self._good = good_events()

    def case(self, number: int) -> str:
        rng = random.Random(f"{self._seed}/events/{number}")
        local = tuple(PageRef(10 + i, Tag(22, 3)) for i in range(PAGES))
        expected = ExpectedPages(PAGES * T, T, tuple(bytes([i]) * 32 for i in range(PAGES)))
        rules: HandoffReceiver[SampledToken] = HandoffReceiver(TICKET_ID, LAYOUT, expected, local, self._checks)
        orders: list[PageOrder] = []
        try:
            for message in self._stream(rng):
                event = _event(message, TICKET, VOCAB)
                order = None if event is None else self._feed(rules, event)
                if order is not None:
                    orders.append(order)
                    if rng.random() < 0.7:
                        rules.verified((order,))
            if rules.completed is not None and not 0 <= rules.completed.first.token_id < VOCAB:
                raise Finding("the first token is outside the vocabulary")
            if rules.completed is not None and rules.completed.cached_tokens > PAGES * T:
                raise Finding("more cached tokens than the prompt has")
            rules.on_end(rng.choice((None, Cancelled("cancelled", "the peer says so"))))
            outcome = "ready" if rules.ready else "complete"
        except GenlockError as error:
            outcome = reason_of(error)
            if rules.ready and rules.state is HandoffState.FAILED:
                raise Finding("a handoff that failed is ready") from error
        self._judge(rules, orders)
        return outcome

    def _stream(self, rng: random.Random) -> list[worker_pb2.HandoffEvent]:
        events = list(self._good)
        way = rng.randrange(5)
        if way == 0:
            rng.shuffle(events)
        elif way == 1:
            del events[rng.randrange(len(events))]
        elif way == 2:
            events.insert(rng.randrange(len(events) + 1), rng.choice(events))
        for _ in range(rng.choice((0, 1, 1, 3))):
            at = rng.randrange(len(events))
            altered = mutated(rng, events[at])
            events[at : at + 1] = [] if altered is None else [altered]
            if not events:
                break
        return events

    def _feed(
        self, rules: HandoffReceiver[SampledToken], event: Accepted | PagePromised | Completed[SampledToken]
    ) -> PageOrder | None:
        before = rules.state
        try:
            return rules.on_event(event)
        except GenlockError:
            if rules.state is not HandoffState.FAILED:
                raise Finding(f"a refused event left the handoff {rules.state} (was {before})") from None
            raise

    def _judge(self, rules: HandoffReceiver[SampledToken], orders: Sequence[PageOrder]) -> None:
        indexes = [o.desc.logical_index for o in orders]
        if len(set(indexes)) != len(indexes) or not set(indexes) <= set(range(PAGES)):
            raise Finding(f"pages {indexes} were ordered")
        if len({o.local for o in orders}) != len(orders):
            raise Finding("two pages into one slot")
        if rules.ready and sorted(indexes) != list(range(PAGES)):
            raise Finding(f"ready with pages {indexes}")

    def close(self) -> None:
        return None


class Pulls:
    """The receiver over real pages: whatever the peer says and sends, a page is the promised one or nobody's."""

    def __init__(self, seed: int, checks: Checks = ALL_CHECKS) -> None:
        self._seed = seed
        self._checks = checks
        self._world: World | None = None

    def case(self, number: int) -> str:
        rng = random.Random(f"{self._seed}/pulls/{number}")
        if self._world is None or number % WORLD_CASES == 0:
            self.close()
            self._begin()
        world = self._world
        assert world is not None
        self._faults = self._draw_faults(rng)
        descs = [self._lie(rng, d) for d in self._descs] if rng.random() < 0.7 else list(self._descs)
        if rng.random() < 0.1:
            rng.shuffle(descs)
        local = world.sink.allocate(OWNER, len(descs))
        try:
            world.pull(descs, TOKENS, local=local)
            outcome = "ok"
        except GenlockError as error:
            outcome = reason_of(error)
        if outcome == "ok":
            self._require_right(world, descs, local)
        world.sink.retire(local, OWNER)
        world.fabric.land_all()
        world.receiver.sweep()
        if world.sink.counts() != self._counts or slot_bytes_of(world.sink, self._beside.page_id) != self._beside_bytes:
            raise Finding(f"after {outcome}: {world.sink.counts()} instead of {self._counts}, or a neighbour changed")
        return outcome

    def _begin(self) -> None:
        self._faults = TransferFaults()
        world = World(self._checks, plan=lambda info: self._faults, slots=12)
        self._descs = world.prompt(TOKENS)
        self._foreign = seal_prompt(world.source, world.keyer, OTHERS, NEIGHBOUR)
        self._beside = seal_prompt(world.sink, world.keyer, OTHERS[:T], NEIGHBOUR)[0].ref
        self._beside_bytes = slot_bytes_of(world.sink, self._beside.page_id)
        self._counts = world.sink.counts()
        self._world = world

    def _draw_faults(self, rng: random.Random) -> TransferFaults:
        if rng.random() < 0.4:
            return TransferFaults()
        size = LAYOUT.slot_bytes

        def flip() -> BitFlip:
            return BitFlip(rng.randrange(PAGES), rng.randrange(size), rng.randrange(8))

        return rng.choice((
            TransferFaults(bit_flips=tuple(flip() for _ in range(rng.choice((1, 1, 3))))),
            TransferFaults(short_tail_bytes=rng.randrange(1, size + 1), short_page=rng.choice((None, 0, 1, 2))),
            TransferFaults(swap=(0, rng.randrange(1, PAGES))),
            TransferFaults(duplicate=(rng.randrange(PAGES), rng.randrange(PAGES))),
            TransferFaults(torn_page=rng.randrange(PAGES)),
            TransferFaults(reverse_order=True),
            TransferFaults(ending=rng.choice(ENDINGS), delay_ms=rng.choice((1, 99)), landed_pages=rng.randrange(PAGES)),
        ))  # fmt: skip

    def _lie(self, rng: random.Random, desc: PageDescriptor) -> PageDescriptor:
        if rng.random() < 0.6:
            return desc
        other = rng.choice((*self._foreign, *self._descs))
        name = rng.choice(("all", "page_id", "tag", *(f.name for f in fields(PageDescriptor))))
        if name == "all":
            return other
        if name == "ref":
            return replace(desc, ref=other.ref)
        if name == "page_id":
            return replace(desc, ref=PageRef(rng.choice((*INTS, *range(12))), desc.ref.tag))
        if name == "tag":
            tag = Tag(rng.choice((11, 22, *INTS)), rng.choice((desc.ref.tag.generation, *INTS)))
            return replace(desc, ref=PageRef(desc.ref.page_id, tag))
        theirs = getattr(other, name)
        value = theirs if rng.random() < 0.5 else rng.randbytes(32) if name == "prefix_key" else rng.choice(INTS)
        return replace(desc, **{name: value})

    def _require_right(self, world: World, descs: Sequence[PageDescriptor], local: Sequence[PageRef]) -> None:
        """Each slot holds the page of this prompt that belongs there."""
        for desc, ref in zip(descs, local, strict=True):
            wanted = self._descs[desc.logical_index]
            if body(slot_bytes_of(world.sink, ref.page_id)) != body(slot_bytes_of(world.source, wanted.ref.page_id)):
                raise Finding(
                    f"page {desc.logical_index} was adopted with other bytes (header is {HEADER_BYTES} bytes)"
                )

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            if world.receiver.unproved_transfers:
                raise Finding(f"{world.receiver.unproved_transfers} transfers are still held")
            world.sink.retire([self._beside], NEIGHBOUR)
            if world.sink.counts().free != 12:
                raise Finding(f"pages are missing: {world.sink.counts()}")


LAYERS = (Layer("handoff events", 5_000, Events), Layer("pulls", 3_000, Pulls))
