"""Two pools on one fabric, with pages whose every value is known: what the kvstore tests play in.

A token's value is its id as a number, in every stream and head, and all keys are equal: attention returns the mean
of the values it attends to, so one foreign page shows in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore import formats
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.descriptor import PageDescriptor
from kvstore.digest import Digester
from kvstore.guard import Guard, Published
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.layout import HEADER_BYTES, AttentionKind, KvFormat, PageLayout
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder, PageReceiver
from kvstore.step import PageRun, PlanRow, StepArrays, StepPlan
from kvstore.tables import ReadTable, WriteTable
from kvstore.transfer.base import Peer, TransferEngine
from kvstore.transfer.faults import FaultHooks, FaultPlan, TransferFaults
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from model.attention.reference import ReferenceBackend

T = 4  # page tokens
SECRET = b"a secret of the test cluster"
LAYOUT = PageLayout(
    "probe", AttentionKind.GQA, layers=1, kv_heads=2, key_width=4, value_width=4, page_tokens=T, kv_format=KvFormat.NONE
)
OWNER, NEIGHBOUR = 1, 2


def fill(guard: Guard, ref: PageRef, values: Sequence[float]) -> None:
    """Writes the values of the first tokens of a page, past every check, as a kernel that was allowed to would."""
    for stream in range(len(guard.layout.streams)):
        for layer in range(guard.layout.layers):
            view = formats.code_view(guard.layout, guard._pool.slots_SU8, layer, stream)
            view[ref.page_id, :, : len(values)] = np.asarray(values, dtype=view.dtype)[:, None]


def values_of(guard: Guard, page_id: int) -> list[float]:
    """The values that lie in a page now."""
    return [float(v) for v in formats.code_view(guard.layout, guard._pool.slots_SU8, 0, 1)[page_id, 0, :, 0]]


def slot_bytes_of(guard: Guard, page_id: int) -> bytes:
    return bytes(guard._pool.slots_SU8[page_id].tobytes())


def make_guard(engine: TransferEngine, incarnation: int, layout: PageLayout = LAYOUT, slots: int = 8, *,
               checks: Checks = ALL_CHECKS, scrub: bool = True) -> Guard:  # fmt: skip
    return Guard(layout, slots, engine, incarnation, Digester(SECRET, layout.slot_bytes), checks=checks, scrub=scrub)


def make_keyer(layout: PageLayout = LAYOUT) -> PrefixKeyer:
    return PrefixKeyer(SECRET, PrefixIdentity("rev", "tok", layout.fingerprint))


def seal_prompt(guard: Guard, keyer: PrefixKeyer, tokens: Sequence[int], owner: int = OWNER,
                tenant: str = "t") -> list[PageDescriptor]:  # fmt: skip
    """Allocates, fills and seals the pages of a prompt."""
    keys = keyer.chain(tenant, tokens, T)
    descs = []
    for i, ref in enumerate(guard.allocate(owner, len(keys))):
        rows = tokens[i * T : (i + 1) * T]
        fill(guard, ref, rows)
        header = PageHeader(ref.tag, guard.layout.fingerprint, i * T, len(rows), keys[i])
        descs.append(guard.seal(ref, owner, header, i))
    return descs


@dataclass
class World:
    """`source` seals prompts, `sink` pulls them. One fault record for every transfer."""

    checks: Checks = ALL_CHECKS
    faults: TransferFaults = field(default_factory=TransferFaults)
    plan: FaultPlan | None = None
    hooks: FaultHooks = field(default_factory=FaultHooks)
    source_layout: PageLayout = LAYOUT
    layout: PageLayout = LAYOUT
    slots: int = 8
    scrub: bool = True

    def __post_init__(self) -> None:
        self.fabric = MemoryFabric(self.plan or (lambda info: self.faults), self.hooks)
        self.source = make_guard(
            MemoryEngine(self.fabric, "prefill"), 11, self.source_layout, self.slots, scrub=self.scrub
        )
        self.engine = MemoryEngine(self.fabric, "decode")
        self.sink = make_guard(self.engine, 22, self.layout, self.slots, checks=self.checks, scrub=self.scrub)
        self.receiver = PageReceiver(self.sink, self.engine)
        self.peer: Peer = self.engine.connect(self.source.export)
        self.keyer = make_keyer(self.layout)

    def expected(self, tokens: Sequence[int], tenant: str = "t") -> ExpectedPages:
        return ExpectedPages(len(tokens), T, self.keyer.chain(tenant, tokens, T))

    def prompt(self, tokens: Sequence[int], owner: int = OWNER, tenant: str = "t") -> list[PageDescriptor]:
        return seal_prompt(self.source, self.keyer, tokens, owner, tenant)

    def pull(self, descs: Sequence[PageDescriptor], tokens: Sequence[int], *, local: Sequence[PageRef] | None = None,
             owner: int = OWNER, timeout_ms: int = 100) -> tuple[PageRef, ...]:  # fmt: skip
        """Pulls into fresh slots unless `local` names some; returns them. Raises what the receiver raises."""
        refs = tuple(local if local is not None else self.sink.allocate(owner, len(descs)))
        orders = [PageOrder(d, r) for d, r in zip(descs, refs, strict=True)]
        self.receiver.pull(self.peer, orders, owner, self.expected(tokens), timeout_ms)
        return refs


class HookedBackend(ReferenceBackend):
    """The reference kernels, with a moment between the comparison of a tag and the bytes that it stands for."""

    def __init__(self, layout: PageLayout, after_compare: Callable[[int], None] | None = None,
                 after_write_compare: Callable[[int], None] | None = None) -> None:  # fmt: skip
        super().__init__(layout)
        self._after_compare = after_compare or (lambda row: None)
        self._after_write_compare = after_write_compare or (lambda row: None)

    def _pages_of(self, row: int, table: ReadTable) -> list[int] | None:
        pages = super()._pages_of(row, table)
        self._after_compare(row)
        return pages

    def _may_write(self, table: WriteTable, token: int) -> bool:
        allowed = super()._may_write(table, token)
        self._after_write_compare(int(table.row_N[token]))
        return allowed


@dataclass
class Moments:
    """What happens in the course of a step, besides the step."""

    on_arrays: Callable[[StepArrays], None] | None = None
    before_write: Callable[[], None] = lambda: None
    before_attend: Callable[[], None] = lambda: None
    after_compare: Callable[[int], None] | None = None
    after_write_compare: Callable[[int], None] | None = None
    before_exit: Callable[[], None] = lambda: None


def run_step(guard: Guard, plan: StepPlan, moments: Moments | None = None) -> dict[int, Published[float]]:
    """One step of the probe: each row's output is the mean of the values of the positions that it sees."""
    at = moments or Moments()
    backend = HookedBackend(guard.layout, at.after_compare, at.after_write_compare)
    with guard.step(plan, at.on_arrays) as step:
        arrays = step.arrays
        values_N = torch.from_numpy(arrays.token_ids_N).float()
        heads = guard.layout.kv_heads
        key_NKD = torch.zeros(len(values_N), heads, guard.layout.key_width)
        value_NKV = values_N[:, None, None].expand(-1, heads, guard.layout.value_width).contiguous()
        at.before_write()
        backend.write(0, [key_NKD, value_NKV], step.write)
        at.before_attend()
        out_NHV = backend.attend(0, torch.zeros_like(key_NKD), step.read, 1.0)
        answers = [float(out_NHV[n].mean()) for n in arrays.logits_at_R.tolist()]
        at.before_exit()
        wanting = [row.request_no for row in plan.rows if row.wants_logits]
        published = step.publish(list(zip(wanting, answers, strict=True)))
    return {p.request_no: p for p in published}


def history(guard: Guard, owner: int, tokens: Sequence[int]) -> PageRun:
    """Pages of a request that has `tokens` behind it: full ones are sealed, and there is room for one more token."""
    full = len(tokens) // T * T
    refs = [d.ref for d in seal_prompt(guard, make_keyer(guard.layout), tokens[:full], owner)] if full else []
    (last,) = guard.allocate(owner, 1)
    fill(guard, last, [float(t) for t in tokens[full:]])
    return PageRun((*refs, last))


def next_token(owner: int, tokens: Sequence[int], token: int, pages: PageRun) -> PlanRow:
    return PlanRow(owner, (token,), len(tokens), pages)


def body(raw: bytes) -> bytes:
    return raw[HEADER_BYTES:]
