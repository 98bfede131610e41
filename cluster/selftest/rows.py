"""Rows of the fault table that one process can show. Each function arms the injector, asks, and says what was seen.

A row's `off` are the checks that its control runs without. Where several checks catch the same fault, all of them are
off: with any single one of them on, the control would be caught as well.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cluster.selftest.injector import Message
from cluster.selftest.lab import PAGE_TOKENS, PROMPT_TOKENS, THIEF, Lab, Reply
from decode.core import StartHandoff
from kvstore.ids import PageRef
from kvstore.keys import token_pages
from kvstore.layout import HEADER_BYTES, HeadOrder, PageLayout, layout_from_canonical
from kvstore.prefix_index import Content
from kvstore.step import StepArrays, StepPlan
from kvstore.tables import U8
from kvstore.transfer.faults import BitFlip, Ending, TransferFaults
from model.attention.base import KvStep

RECEIPT = ("header", "prefix_key", "digest", "source_tag")
READS = ("entry", "kernel", "exit")
ENDS = ("stream_end", "exact_set")


@dataclass(frozen=True)
class Observed:
    """What a trial saw. `others_ok`: bystanders that the row itself watches. `damage`: foreign bytes that were let
    through although the text came out right."""

    reply: Reply
    others_ok: bool = True
    damage: bool = False


@dataclass(frozen=True)
class Row:
    number: str
    name: str
    off: tuple[str, ...]
    run: Callable[[Lab], Awaitable[Observed]] | None = None  # None: kills.py has it
    flags: dict[str, object] = field(default_factory=dict)
    prefill_flags: dict[str, object] = field(default_factory=dict)
    prompt_tokens: int = PROMPT_TOKENS
    # Whose reply the row reports: the victim, or a bystander where the victim itself hears nothing.
    reported: str = "victim"

    @property
    def must_fail(self) -> bool:
        """False where the right outcome is the right answer of a bystander."""
        return self.reported == "victim"


async def _arm(lab: Lab, *, foreign_first: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The victim's and the foreign prompt; the foreign one perhaps computed before."""
    lab.inject.victim = lab.victim_prompt
    foreign = lab.subject.prompt("foreign")
    if foreign_first:
        await lab.ask(foreign, 1)
    return lab.inject.victim, foreign


def _pages_of(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.WhichOneof("event") == "page"]


def _replace_pages(pages: Sequence[Message], handoff_id: bytes | None = None) -> Callable[..., list[Message]]:
    """An event hook that sends recorded pages instead of the victim's own."""

    def hook(start: StartHandoff, messages: list[Message]) -> list[Message]:
        own = [m for m in messages if m.WhichOneof("event") != "page"]
        if len(own) == len(messages):
            return messages
        out = [Message.FromString(p.SerializeToString()) for p in pages]
        for page in out:
            page.handoff_id = page.handoff_id if handoff_id is None else own[0].handoff_id
        return [*out, *own]

    return hook


async def unknown_handoff(lab: Lab) -> Observed:
    _, foreign = await _arm(lab, foreign_first=True)
    lab.inject.on_event = _replace_pages(lab.inject.recorded[foreign])
    return Observed(await lab.ask_victim())


async def out_of_pool(lab: Lab) -> Observed:
    _, foreign = await _arm(lab, foreign_first=True)
    slots = lab.prefill.guard.slots
    outside = [p.page.page_id + slots for p in lab.inject.recorded[foreign]]

    def hook(start: StartHandoff, messages: list[Message]) -> list[Message]:
        for page, page_id in zip(_pages_of(messages), outside, strict=False):
            page.page.page_id = page_id
        return messages

    lab.inject.on_event = hook
    lab.inject.faults = TransferFaults(wrap_out_of_range=True)
    return Observed(await lab.ask_victim())


async def consumed_again(lab: Lab) -> Observed:
    victim, foreign = await _arm(lab)
    first = await lab.ask_victim()
    assert lab.subject.right(victim, first), "the first use is healthy"
    await lab.recycle(foreign)
    lab.inject.on_event = _replace_pages(lab.inject.recorded[victim])
    return Observed(await lab.ask_victim())


async def kept_until_recycled(lab: Lab) -> Observed:
    _, foreign = await _arm(lab)
    lab.inject.before_pull = _once(lambda: lab.from_thread(lambda: lab.recycle(foreign)))
    return Observed(await lab.ask_victim())


async def lease_expired(lab: Lab) -> Observed:
    _, foreign = await _arm(lab)

    async def expire() -> None:
        lab.inject.clock_shift_ms += lab.config.transfer.lease_ms + 1
        leases = lab.prefill_engine.core.leases
        for _ in range(400):
            if not len(leases):
                break
            await asyncio.sleep(0.01)
        await lab.recycle(foreign)

    lab.inject.before_pull = _once(lambda: lab.from_thread(expire))
    return Observed(await lab.ask_victim())


def bit_flip(where: str) -> Callable[[Lab], Awaitable[Observed]]:
    async def run(lab: Lab) -> Observed:
        await _arm(lab)
        layout = lab.decode.guard.layout
        key, value = layout.streams
        # Chosen to weigh: the first key in the middle of a real network, and rows that the probe reads (from 1 on). Of
        # a scale, an exponent bit that leaves a finite number, since the model's own output is checked for others.
        if lab.subject.name == "probe":
            layer, code_row, scale = HEADER_BYTES, 1, (value.scales_offset + 1 * 4 + 3, 2)
        else:
            layer = HEADER_BYTES + layout.layers // 2 * layout.layer_bytes
            code_row, scale = 0, (key.scales_offset + 5 * 4 + 3, 1)
        offset, bit = {
            "payload": (layer + key.codes_offset + code_row * key.width, 7),
            "scale": (layer + scale[0], scale[1]),
            "header": (48, 0),
        }[where]
        lab.inject.faults = TransferFaults(bit_flips=(BitFlip(0, offset, bit),))
        reply = await lab.ask_victim()
        return Observed(reply, damage=where == "header" and reply.error is None)

    return run


async def truncated(lab: Lab) -> Observed:
    await _arm(lab)
    lab.inject.faults = TransferFaults(short_tail_bytes=lab.decode.guard.layout.slot_bytes * 3 // 4)
    return Observed(await lab.ask_victim())


async def swapped(lab: Lab) -> Observed:
    """A full page and the partial last one. (Two full pages that change slots would not even show in the answer, since
    rotary keys carry their positions with them; they are refused all the same.)"""
    await _arm(lab)
    lab.inject.faults = TransferFaults(swap=(0, 4))
    return Observed(await lab.ask_victim())


async def missing_and_twice(lab: Lab) -> Observed:
    await _arm(lab)

    def hook(start: StartHandoff, messages: list[Message]) -> list[Message]:
        pages = _pages_of(messages)
        return messages if not pages else [pages[0], pages[1], pages[1], pages[3], messages[-1]]

    lab.inject.on_event = hook
    return Observed(await lab.ask_victim())


async def torn(lab: Lab) -> Observed:
    _, foreign = await _arm(lab)
    lab.inject.faults = TransferFaults(torn_page=3)
    lab.inject.between_halves = _once(lambda: lab.from_thread(lambda: lab.recycle(foreign)))
    return Observed(await lab.ask_victim())


async def restarted(lab: Lab) -> Observed:
    """Descriptors of the former life, delivered by the new one whose slots hold another prompt."""
    victim, foreign = await _arm(lab)
    first = await lab.ask_victim()
    assert lab.subject.right(victim, first), "the first life is healthy"
    old = lab.inject.recorded[victim]
    await lab.restart_prefill()
    # The same slots in the same order: fill the new pool with other prompts.
    await lab.ask(lab.subject.prompt("filler"), 1)
    await lab.ask(foreign, 1)
    lab.inject.on_event = _replace_pages(old, handoff_id=b"own")
    return Observed(await lab.ask_victim())


def given_away(when: str) -> Callable[[Lab], Awaitable[Observed]]:
    """The victim's first page goes to somebody else, with other bytes, between two steps or inside one."""

    async def run(lab: Lab) -> Observed:
        victim, _ = await _arm(lab)
        stolen: list[PageRef] = []

        def steal() -> None:
            number, pages = lab.decode_pages(victim)
            if number and not stolen and len(pages) > 4:  # a few tokens are out already
                stolen.append(lab.steal(pages[0], number, pages[2]))

        def between() -> bool:
            steal()
            return True

        def during(plan: StepPlan, kv: KvStep) -> KvStep:
            def stealing(layer, query, streams, scale):  # type: ignore[no-untyped-def] # KvStep's own types
                if layer == 0:
                    steal()
                return kv(layer, query, streams, scale)

            return stealing

        if when == "between":
            lab.inject.before_decode_plan = between
        else:
            lab.inject.wrap_kv = during
        reply = await lab.ask_victim()
        await lab.decode.engine.loop.call(lambda: lab.decode.guard.retire(stolen, THIEF))
        return Observed(reply)

    return run


async def stale_append(lab: Lab) -> Observed:
    """The victim's open page is freed and becomes the first page of another request; then the victim appends."""
    victim, _ = await _arm(lab)
    other = lab.subject.prompt("other")
    freed = threading.Event()
    joined = threading.Event()
    loop = asyncio.get_running_loop()
    other_reply: list[concurrent.futures.Future[Reply]] = []

    def before_plan() -> bool:
        number, pages = lab.decode_pages(victim)
        if number and not freed.is_set():
            if len(pages) <= 4:
                return True
            lab.decode.guard.retire((pages[-1],), number)
            freed.set()
            other_reply.append(asyncio.run_coroutine_threadsafe(lab.ask(other, lab.subject.answer_tokens), loop))
        if freed.is_set() and not joined.is_set():
            if not lab.decode_pages(other)[0]:
                return False  # nobody steps until the page has its new owner
            joined.set()
        return True

    lab.inject.before_decode_plan = before_plan
    reply = await lab.ask_victim()
    second = await asyncio.wrap_future(other_reply[0])
    ok = lab.subject.right(other, second)
    return Observed(reply, others_ok=ok, damage=not ok)


async def early_notice(lab: Lab) -> Observed:
    await _arm(lab)
    lab.inject.faults = TransferFaults(ending=Ending.EARLY_NOTICE)
    reply = await lab.ask_victim()
    lab.inject.landing_gate.set()
    return Observed(reply)


def layouts_differ(field_name: str) -> Callable[[Lab], Awaitable[Observed]]:
    """A producer with another layout of the same size; its bytes and its digests are its own."""

    async def run(lab: Lab) -> Observed:
        await _arm(lab)
        ours = lab.decode.guard.layout
        changes: dict[str, object] = {
            "order": HeadOrder.TOKEN_MAJOR,
            "kv_heads": ours.kv_heads // 2 or 2,
            "page_tokens": ours.page_tokens * 2,
            "kv_format": "none",
        }
        theirs = layout_from_canonical(
            ours.canonical().replace(
                f'"{field_name}":{_json(getattr(ours, field_name))}', f'"{field_name}":{_json(changes[field_name])}'
            )
        )

        def hook(start: StartHandoff, messages: list[Message]) -> list[Message]:
            for message in messages:
                if message.WhichOneof("event") == "accepted":
                    message.accepted.pool.layout = theirs.canonical()
                if message.WhichOneof("event") == "page":
                    message.page.layout_fingerprint = theirs.fingerprint
            return messages

        lab.inject.on_event = hook
        lab.inject.after_landing = lambda slots, ids: _as_token_major(ours, slots, ids)
        return Observed(await lab.ask_victim())

    return run


def _json(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _as_token_major(layout: PageLayout, slots_SU8: U8, page_ids: Sequence[int]) -> None:
    """Rewrites landed pages as a token-major producer would have laid them out."""
    for page_id in page_ids:
        slot = slots_SU8[page_id]
        for layer in range(layout.layers):
            for stream in layout.streams:
                start = HEADER_BYTES + layer * layout.layer_bytes + stream.codes_offset
                row = stream.width * layout.element_bytes
                codes = slot[start : start + stream.codes_bytes].reshape(stream.heads, layout.page_tokens, row)
                slot[start : start + stream.codes_bytes] = codes.transpose(1, 0, 2).reshape(-1).copy()


async def cancelled_late_bytes(lab: Lab) -> Observed:
    """The client leaves while the copy runs; its late bytes land when the slots could long be somebody else's."""
    victim, _ = await _arm(lab)
    other = lab.subject.prompt("other")
    copying, land = threading.Event(), threading.Event()

    def hold() -> None:
        copying.set()
        land.wait(30)

    lab.inject.before_copy = hold
    task = asyncio.create_task(lab.ask_victim())
    await asyncio.to_thread(copying.wait, 30)
    task.cancel()
    while lab.decode_request_no(victim) is not None:
        await asyncio.sleep(0.005)
    first = asyncio.Event()
    second = asyncio.create_task(lab.ask(other, lab.subject.answer_tokens, lambda count: first.set()))
    await first.wait()
    land.set()
    reply = await second
    # The victim heard nothing; what counts is the request that came after it.
    return Observed(reply, others_ok=lab.subject.right(other, reply))


async def permuted(lab: Lab) -> Observed:
    """Tables of two requests change places inside a step, their tokens do not."""
    victim, _ = await _arm(lab)
    other = lab.subject.prompt("other")
    done: list[bool] = []

    def swap(arrays: StepArrays) -> None:
        numbers = arrays.request_no_B.tolist()
        pair = [lab.decode_pages(p) for p in (victim, other)]
        if done or any(not n or n not in numbers or len(pages) != 5 for n, pages in pair):
            return
        done.append(True)
        a, b = (numbers.index(n) for n, _ in pair)
        for array in (arrays.page_ids_BP, arrays.expected_BP2):
            array[[a, b]] = array[[b, a]]

    lab.inject.on_arrays = swap
    reply, second = await asyncio.gather(lab.ask_victim(), lab.ask(other, lab.subject.answer_tokens))
    fenced = second.error is not None and not lab.subject.right(other, second)
    return Observed(reply, others_ok=fenced or lab.subject.right(other, second))


async def poisoned_index(lab: Lab) -> Observed:
    """Prefill's index hands out sealed, live, intact pages of another prompt."""
    victim, foreign = await _arm(lab, foreign_first=True)
    engine = lab.prefill_engine

    def poison() -> None:
        core = engine.core
        wrong = core._keyer.chain("default", foreign, PAGE_TOKENS)
        own = core._keyer.chain("default", victim, PAGE_TOKENS)
        content: Content | None = None
        for mine, theirs, tokens in zip(own[:3], wrong[:3], token_pages(victim, PAGE_TOKENS)[:3], strict=True):
            # Key, tenant and tokens are the victim's, as a lookup wants them; the page is not.
            content = Content("default", tokens, content)
            core.index.insert(mine, core.index._pages[theirs].ref, content)

    await engine.loop.call(poison)
    return Observed(await lab.ask_victim())


def _once(work: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def run() -> None:
        if not done:
            done.append(True)
            work()

    return run


ROWS: tuple[Row, ...] = (
    Row("1", "unknown transfer id", ("handoff_id", "prefix_key"), unknown_handoff),
    Row("2", "page ids outside the pool", ("bounds", *RECEIPT), out_of_pool),
    Row("3", "consumed handoff used again", ("handoff_id", *RECEIPT), consumed_again),
    Row("4", "descriptor kept until its pages were recycled", RECEIPT, kept_until_recycled),
    Row("5", "lease expired", RECEIPT, lease_expired),
    Row("6a", "one bit flipped in the payload", ("digest",), bit_flip("payload")),
    Row("6b", "one bit flipped in a scale", ("digest",), bit_flip("scale")),
    Row("6c", "one bit flipped in a header", ("header", "prefix_key", "digest"), bit_flip("header")),
    Row("7", "page truncated, tail of zeros", ("digest",), truncated),
    Row("8", "two pages swapped", ("header", "prefix_key", "digest"), swapped, prompt_tokens=72),
    Row("9", "one page missing, another delivered twice", ("exact_set",), missing_and_twice),
    Row("10", "page overwritten while it is copied", ("digest", "source_tag"), torn),
    Row("11", "prefill restarted, same name, port and slots", ("incarnation", *RECEIPT), restarted),
    Row("12a", "own page given away between two steps", READS, given_away("between")),
    Row("12b", "own page given away during a step", READS, given_away("during")),
    Row("13", "stale owner appends to a page that moved on", ("write", *READS), stale_append),
    Row(
        "14",
        "completion told before the bytes are there",
        ("header", "prefix_key", "digest", "quarantine"),
        early_notice,
    ),
    Row("15a", "layouts differ: head-major and token-major", ("layout", "header", "digest"), layouts_differ("order")),
    Row("15b", "layouts differ: page tokens", ("layout", "header", "digest"), layouts_differ("page_tokens")),
    Row("15c", "layouts differ: format", ("layout", "header", "digest"), layouts_differ("kv_format")),
    Row("15d", "layouts differ: heads", ("layout", "header", "digest"), layouts_differ("kv_heads")),
    Row("16", "cancelled while copying, late bytes", ("quarantine",), cancelled_late_bytes, reported="other"),
    Row(
        "17a",
        "prefill killed while the request is queued",
        ENDS,
        prompt_tokens=1024,
        flags={"cache.prefill_pages": 100},
    ),
    Row("17b", "prefill killed while it computes", ENDS, prompt_tokens=1024),
    Row("17c", "prefill killed with half the pages handed over", ENDS, prompt_tokens=1024),
    Row("18", "decode killed in the middle of an answer", ENDS),
    Row("19", "rows of a step permuted", ("rows",), permuted),
    Row("20", "prefix index hands out a foreign page", ("prefix_key",), poisoned_index),
)
