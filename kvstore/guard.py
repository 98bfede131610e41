"""The guard: the one door through which pages are read or written.

It owns the pool's memory and its book, moves tags before anybody can write a slot, and judges every step: on entry,
inside the kernels (through the tables that it yields) and on exit, before a token may leave.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.allocator import PageAllocator, PoolCounts
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.descriptor import PageDescriptor
from kvstore.digest import Digester
from kvstore.errors import CorruptPage, GenlockError, InvalidInput, LifecycleError, StalePage
from kvstore.header import KEY_BYTES, PageHeader, unpack_header
from kvstore.ids import PageRef
from kvstore.layout import WORKING_FORMATS, HeadOrder, PageLayout
from kvstore.lifecycle import SlotState
from kvstore.pool import PoolStorage
from kvstore.step import StepArrays, StepPlan
from kvstore.tables import (
    FLAG_ENTRY,
    FLAG_EXIT,
    FLAG_KERNEL_READ,
    FLAG_KERNEL_WRITE,
    FLAG_NONFINITE,
    FLAG_ROWS,
    ReadTable,
    WriteTable,
)
from kvstore.transfer.base import TransferEngine

T = TypeVar("T")

# In the order in which they are reported when a row has several.
_FLAG_ERRORS: tuple[tuple[int, str, type[GenlockError], str], ...] = (
    (FLAG_ROWS, "rows_disagree", StalePage, "the step's arrays do not belong together"),
    (FLAG_ENTRY, "stale_at_entry", StalePage, "a page had moved on before the step"),
    (FLAG_KERNEL_WRITE, "stale_write", StalePage, "a page to be written had moved on"),
    (FLAG_NONFINITE, "nonfinite_kv", CorruptPage, "the model made a key or value that is not a finite number"),
    (FLAG_KERNEL_READ, "stale_in_kernel", StalePage, "a page moved on while it was read"),
    (FLAG_EXIT, "stale_at_exit", StalePage, "a page moved on before the step ended"),
)


@dataclass(frozen=True)
class Published(Generic[T]):
    """What leaves a step for one row: its output, or the typed error that ends its request."""

    request_no: int
    output: T | None
    error: GenlockError | None


class GuardedStep:
    """One step in progress. Tokens leave only through `publish`, which runs the exit check."""

    def __init__(self, guard: Guard, plan: StepPlan, arrays: StepArrays, read: ReadTable, write: WriteTable) -> None:
        self._guard = guard
        self.plan = plan
        self.arrays = arrays
        self.read = read
        self.write = write

    def publish(self, outputs: Sequence[tuple[int, T]]) -> list[Published[T]]:
        """Exit check, then one result for each row of the plan. `outputs` are (request number, output) of the rows
        that wanted logits, in plan order; a row whose output carries another number is not answered."""
        return self._guard._exit(self, outputs)


class Guard:
    """Owner of one pool. Methods may be called from several threads."""

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        engine: TransferEngine,
        incarnation: int,
        digester: Digester,
        *,
        checks: Checks = ALL_CHECKS,
        scrub: bool = True,
        spares: int = 0,
    ) -> None:
        """`spares`: slots beside the pool's, for the start-up self-test (beacon.py)."""
        if layout.kv_format not in WORKING_FORMATS:
            raise InvalidInput("format_not_built", f"kv_format {layout.kv_format} is not built", field="kv_format")
        if layout.order is not HeadOrder.HEAD_MAJOR:
            raise InvalidInput("order_not_built", f"order {layout.order} is not built", field="layout.order")
        if layout.tp_size != 1:
            ranks = f"a worker is one rank: pages of one out of {layout.tp_size} ranks are not built"
            raise InvalidInput("ranks_not_built", ranks, field="layout.tp_size")
        if digester.slot_bytes != layout.slot_bytes:
            raise InvalidInput(
                "bad_slot_bytes",
                f"the digester is for slots of {digester.slot_bytes} bytes, the layout has {layout.slot_bytes}",
                field="digest.slot_bytes",
            )
        self.layout = layout
        self.checks = checks
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self._scrub = scrub
        self._digester = digester
        self._lock = threading.RLock()
        self._count_lock = threading.Lock()
        self.spares = spares
        self._pool = PoolStorage(layout, slots + spares, engine.allocate(slots + spares, layout.slot_bytes))
        self._book = PageAllocator(slots, incarnation, self._pool.set_tag, self._freed, checks, spares)
        for page_id in range(slots + spares):
            self._pool.set_tag(page_id, self._book.live_tag(page_id))
        self.export = engine.publish(incarnation, layout.canonical())

    def count_all(self, amounts: Sequence[tuple[str, int]]) -> None:
        """`count` for several at once."""
        with self._count_lock:
            for name, amount in amounts:
                self.counters[name] += amount

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to `counters`. `counters[name] += 1` alone loses events when several threads count."""
        with self._count_lock:
            self.counters[name] += amount

    # --- the book -----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return len(self._book)

    @property
    def free_pages(self) -> int:
        return self._book.free_pages

    def counts(self) -> PoolCounts:
        with self._lock:
            return self._book.counts()

    def slot_state(self, page_id: int) -> SlotState:
        return self._book.slot(page_id).state

    def is_live(self, ref: PageRef) -> bool:
        return self._book.is_live(ref)

    def allocate(self, owner: int, count: int) -> tuple[PageRef, ...]:
        """Pages for `owner`, all or none; their tags have moved. Raises NoCapacity('no_pages')."""
        with self._lock:
            return self._book.allocate(owner, count)

    @property
    def free_spares(self) -> int:
        return self._book.free_spares

    def allocate_spare(self, owner: int) -> PageRef:
        """A slot beside the pool's, however full the pool is. Raises NoCapacity('no_spares')."""
        with self._lock:
            return self._book.allocate_spare(owner)

    def fill(self, ref: PageRef, owner: int, body: bytes) -> None:
        """Writes `slot_bytes - 128` bytes into an own open page. Raises StalePage, LifecycleError."""
        with self._lock:
            self._book.require_open((ref,), owner)
            self._pool.write_body(ref.page_id, body)

    def retire(self, refs: Iterable[PageRef], owner: int) -> None:
        """Gives pages back, all or none. Raises PagePinned, StalePage, LifecycleError."""
        with self._lock:
            self._book.retire(refs, owner)

    def condemn(self, refs: Iterable[PageRef]) -> int:
        """Takes pages away from every reader at once; refs that have moved on are passed over. Returns how many."""
        with self._lock:
            return sum(self._book.condemn(ref) for ref in refs)

    def share(self, refs: Sequence[PageRef]) -> None:
        with self._lock:
            self._book.share(refs)

    def unshare(self, refs: Iterable[PageRef]) -> None:
        with self._lock:
            self._book.unshare(refs)

    def lease(self, refs: Sequence[PageRef]) -> None:
        with self._lock:
            self._book.lease(refs)

    def release(self, refs: Iterable[PageRef]) -> None:
        with self._lock:
            self._book.release(refs)

    def hold(self, refs: Sequence[PageRef]) -> None:
        with self._lock:
            self._book.hold(refs)

    def prove(self, refs: Iterable[PageRef]) -> None:
        with self._lock:
            self._book.prove(refs)

    def seal(
        self, ref: PageRef, owner: int, header: PageHeader, logical_index: int, *, keep_in_cache: bool = False
    ) -> PageDescriptor:
        """Closes an open page, writes its header, digests it. Returns the descriptor that a peer may be given.

        Raises StalePage or LifecycleError ('header_not_own' names the field), and then the page is unchanged.
        StalePage also when the page was taken away while it was digested.
        """
        self._require_own_header(ref, header, logical_index)
        with self._lock:
            self._book.seal(ref, owner, keep_in_cache=keep_in_cache)
            self._pool.zero_tail(ref.page_id, header.valid_rows)
            raw = self._pool.write_header(ref.page_id, header)
        sums = self._digest_sealed(ref)
        self.count("sealed")
        return PageDescriptor(
            ref=ref,
            logical_index=logical_index,
            first_position=header.first_position,
            valid_rows=header.valid_rows,
            byte_length=self.layout.slot_bytes,
            layout_fingerprint=self.layout.fingerprint,
            prefix_key=header.prefix_key,
            digest=self._digester.finish(sums, raw),
        )

    def describe(self, ref: PageRef, logical_index: int) -> PageDescriptor:
        """The descriptor of a page that was sealed before (a prefix hit): what its header says, and its digest now.

        Raises StalePage when the page has moved on, also meanwhile, or its header is not its own, and LifecycleError
        for a page that is still open: what it holds can change.
        """
        with self._lock:
            if not self._book.is_live(ref):
                raise StalePage("stale_ref", f"page {ref.page_id} has moved on")
            if self._book.slot(ref.page_id).state is not SlotState.SEALED:
                raise LifecycleError("not_sealed", f"page {ref.page_id} is still open")
            raw = self._pool.header_bytes(ref.page_id)
            header = self._pool.read_header(ref.page_id)
        if header is None or header.tag != ref.tag:
            raise StalePage("header_mismatch", f"page {ref.page_id} does not carry its own tag")
        sums = self._digest_sealed(ref)
        return PageDescriptor(
            ref, logical_index, header.first_position, header.valid_rows, self.layout.slot_bytes,
            header.layout_fingerprint, header.prefix_key, self._digester.finish(sums, raw),
        )  # fmt: skip

    def _digest_sealed(self, ref: PageRef) -> npt.NDArray[np.uint64]:
        """Body sums of a page, read without the lock; StalePage unless the page was the ref's until the end."""
        sums = self._digester.body_sums(self._pool.slots_SU8[ref.page_id])
        if not self.is_live(ref):
            raise StalePage("stale_ref", f"page {ref.page_id} moved on while it was digested")
        return sums

    def _require_own_header(self, ref: PageRef, header: PageHeader, logical_index: int) -> None:
        layout = self.layout
        wrong = (
            ("tag", header.tag != ref.tag),
            ("layout_fingerprint", header.layout_fingerprint != layout.fingerprint),
            ("first_position", header.first_position != logical_index * layout.page_tokens or logical_index < 0),
            ("valid_rows", not 1 <= header.valid_rows <= layout.page_tokens),
            ("prefix_key", len(header.prefix_key) != KEY_BYTES),
        )
        for name, bad in wrong:
            if bad:
                raise LifecycleError(
                    "header_not_own",
                    f"page {ref.page_id}: the header's {name} is not the page's",
                    field=f"header.{name}",
                )

    # --- receipt (kvstore/receive.py is the only caller) ----------------------------------------------------------

    def landed_header(self, ref: PageRef) -> PageHeader | None:
        """The header that lies in a slot now, whoever wrote it."""
        return self._pool.read_header(ref.page_id)

    def landed_headers(self, refs: Sequence[PageRef], wanted: Sequence[PageHeader]) -> list[PageHeader | None]:
        """`landed_header` of several; one that is byte for byte the wanted one need not be parsed."""
        raws = self._pool.headers([ref.page_id for ref in refs])
        return [
            header if raw == header.pack() else unpack_header(raw) for raw, header in zip(raws, wanted, strict=True)
        ]

    def landed_digests(self, refs: Sequence[PageRef], body_sums_n2: npt.NDArray[np.uint64] | None) -> list[int]:
        """Digests of what lies in these slots now; `body_sums_n2` uint64 [n, 2] if the engine summed while copying."""
        slots_SU8 = self._pool.slots_SU8
        ids_n = np.array([ref.page_id for ref in refs], np.int64)
        if body_sums_n2 is None:
            body_sums_n2 = self._digester.body_sums_many(slots_SU8, ids_n)
        digests: list[int] = self._digester.finish_many(body_sums_n2, slots_SU8, ids_n).tolist()
        return digests

    def prepare_landing(self, refs: Sequence[PageRef], owner: int) -> None:
        """An engine is about to write these slots: they must be `owner`'s own open pages that nothing else may write.

        Takes a hold on all or none, and wipes their headers, so that nothing left over from an earlier read can pass
        for an arrival. Raises StalePage or LifecycleError ('not_owner', 'not_open', 'page_busy').
        """
        with self._lock:
            self._book.claim(refs, owner)
            self._pool.wipe_headers([ref.page_id for ref in refs])

    def adopt(self, pages: Sequence[tuple[PageRef, PageHeader]], owner: int) -> None:
        """Gives verified pages our own headers, all or none; a full page is sealed, a partial one stays open for
        appends. Raises StalePage or LifecycleError."""
        with self._lock:
            self._book.require_open([ref for ref, _ in pages], owner)
            full = self.layout.page_tokens
            self._book.seal_many([ref for ref, header in pages if header.valid_rows == full])
            self._pool.write_headers([ref.page_id for ref, _ in pages], [header for _, header in pages])

    # --- steps --------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, plan: StepPlan, on_arrays: Callable[[StepArrays], None] | None = None) -> Iterator[GuardedStep]:
        """Reading and writing of one step. The entry check flags rows; kernels skip flagged rows.

        Until the block ends the pages that the step writes are on hold: one that is given back meanwhile waits in
        quarantine, so that a late kernel cannot write into the next owner's page. `on_arrays` is a fault-injection
        hook that sees the packed arrays before the entry check.
        """
        checks = self.checks
        arrays = StepArrays.build(plan, self.layout.page_tokens, seals=checks.rows)
        if on_arrays is not None:
            on_arrays(arrays)
        pool, flags = self._pool, arrays.flags_B
        compared = self._check(arrays, checks.entry, FLAG_ENTRY)
        read = ReadTable(
            self.layout, pool.slots_SU8, pool.live_S2, arrays.page_ids_BP, arrays.expected_BP2, arrays.context_len_B,
            arrays.query_start_B1, arrays.position_N, flags, checks.kernel,
        )  # fmt: skip
        write = WriteTable(
            self.layout, pool.slots_SU8, pool.live_S2, arrays.slot_N, arrays.offset_N, arrays.write_expected_N2,
            arrays.row_N, flags, checks.write,
        )  # fmt: skip
        self.count_all(
            (
                ("read_entry", compared),
                ("read_kernel", arrays.pages * self.layout.layers),
                ("write_rows", len(arrays.row_N)),
            )
        )
        claimed = self._claim_writes(plan, arrays) if checks.write else []
        try:
            yield GuardedStep(self, plan, arrays, read, write)
        finally:
            if claimed:
                with self._lock:
                    self._book.unclaim(claimed)

    def _exit(self, step: GuardedStep, outputs: Sequence[tuple[int, T]]) -> list[Published[T]]:
        arrays, plan, numbered = step.arrays, step.plan, self.checks.rows
        self.count("read_exit", self._check(arrays, self.checks.exit, FLAG_EXIT))
        # By the plan's order, never by an array that could have been permuted; a row without an output is not answered.
        complete = len(outputs) == len(arrays.logits_at_R)
        following = iter(outputs)
        published: list[Published[T]] = []
        for row, flags in zip(plan.rows, arrays.flags_B.tolist(), strict=True):
            number, output = next(following, (row.request_no, None)) if row.wants_logits else (row.request_no, None)
            misplaced = (row.wants_logits and not complete) or (numbered and number != row.request_no)
            error = self._error(flags | (FLAG_ROWS * misplaced)) if flags or misplaced else None
            published.append(Published(row.request_no, None if error else output, error))
        return published

    def _error(self, flags: int) -> GenlockError | None:
        for flag, reason, kind, message in _FLAG_ERRORS:
            if flags & flag:
                self.count(f"refused_{reason}")
                return kind(reason, message)
        return None

    def _check(self, arrays: StepArrays, live: bool, flag: int) -> int:
        """Rows and, where `live`, tags of one step, in one call. Returns the pages compared."""
        rows = self.checks.rows
        return arrays.check(self._pool.live_S2, FLAG_ROWS * rows, flag * live) if rows or live else 0

    def _claim_writes(self, plan: StepPlan, arrays: StepArrays) -> list[PageRef]:
        """A row may write only pages that are open, its own and nobody else's to write. Returns those now on hold."""
        claimed: list[PageRef] = []
        page_tokens, book = self.layout.page_tokens, self._book
        with self._lock:
            for b, row in enumerate(plan.rows):
                refs, number = row.pages.refs, row.request_no
                first = row.first_position // page_tokens
                if len(row.token_ids) == 1 and 0 <= first < len(refs) and book.claim_one(refs[first], number):
                    claimed.append(refs[first])  # every row of a decode step
                    continue
                refs = refs[max(first, 0) : (row.context_len - 1) // page_tokens + 1]
                try:
                    book.claim(refs, number)
                except (StalePage, LifecycleError):
                    arrays.flags_B[b] |= FLAG_KERNEL_WRITE
                else:
                    claimed.extend(refs)
        return claimed

    def _freed(self, page_id: int) -> None:
        if self._scrub:
            self._pool.scrub(page_id)
