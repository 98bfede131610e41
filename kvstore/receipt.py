"""The judgement of a received page, as pure functions in the order in which they run.

descriptor: bounds, layout, place, prefix key of our own ticket → page: header → digest → source's live tag.
Each raises a typed error with a stable reason; the caller ends that one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.checks import Checks
from kvstore.descriptor import PageDescriptor
from kvstore.errors import CorruptPage, LayoutMismatch, StalePage
from kvstore.header import PageHeader
from kvstore.layout import PageLayout
from kvstore.transfer.base import PoolExport


@dataclass(frozen=True)
class ExpectedPages:
    """What decode computes from its own ticket: the place and the key of every prompt page."""

    prompt_tokens: int
    page_tokens: int
    keys: tuple[bytes, ...]

    @property
    def count(self) -> int:
        return len(self.keys)

    def valid_rows(self, index: int) -> int:
        return min(self.page_tokens, self.prompt_tokens - index * self.page_tokens)


def judge_descriptor(
    desc: PageDescriptor, export: PoolExport, layout: PageLayout, expected: ExpectedPages, checks: Checks
) -> None:
    """Before anything moves. Raises StalePage, CorruptPage or LayoutMismatch."""
    if checks.bounds and not 0 <= desc.ref.page_id < export.slots:
        raise CorruptPage("page_out_of_bounds", f"page {desc.ref.page_id} is outside the peer's {export.slots} pages")
    if checks.layout and desc.layout_fingerprint != layout.fingerprint:
        raise LayoutMismatch("descriptor_layout", "a descriptor has another layout", field="layout_fingerprint")
    if checks.layout and desc.byte_length != layout.slot_bytes:
        raise LayoutMismatch("descriptor_length", "a descriptor has another page size", field="byte_length")
    if checks.incarnation and desc.ref.tag.incarnation != export.incarnation:
        raise StalePage("stale_incarnation", "a descriptor names another life of its pool")
    if not 0 <= desc.logical_index < expected.count:
        raise StalePage("page_not_expected", f"the prompt has no page {desc.logical_index}")
    if checks.header and (
        desc.first_position != desc.logical_index * expected.page_tokens
        or desc.valid_rows != expected.valid_rows(desc.logical_index)
    ):
        raise StalePage("page_misplaced", f"page {desc.logical_index} claims other positions than it must hold")
    if checks.prefix_key and desc.prefix_key != expected.keys[desc.logical_index]:
        raise StalePage("foreign_prefix_key", f"page {desc.logical_index} was computed from other tokens")


def judge_header(header: PageHeader | None, desc: PageDescriptor, expected: ExpectedPages, checks: Checks) -> None:
    """The arrived header is the descriptor's, and its key is the one that our own tokens give."""
    if checks.header and header != desc.header:
        which = "unreadable" if header is None else _first_difference(header, desc.header)
        raise StalePage("header_mismatch", f"the arrived page's header differs: {which}")
    if checks.prefix_key and (header is None or header.prefix_key != expected.keys[desc.logical_index]):
        raise StalePage("foreign_prefix_key", f"page {desc.logical_index} arrived with another prompt's key")


def judge_digest(digest: int, desc: PageDescriptor, checks: Checks) -> None:
    if checks.digest and digest != desc.digest:
        raise CorruptPage("digest_mismatch", f"page {desc.logical_index} is not what was sealed")


def judge_source(live: Mapping[int, tuple[int, ...]] | None, desc: PageDescriptor, checks: Checks) -> None:
    """`live`: the source's (incarnation, generation) of pages, read after the data; one that was not read proves
    nothing."""
    if checks.source_tag and (live or {}).get(desc.ref.page_id) != desc.ref.tag:
        raise StalePage("source_moved_on", f"page {desc.logical_index} was recycled while it was read")


def _first_difference(ours: PageHeader, wanted: PageHeader) -> str:
    for name in ("tag", "layout_fingerprint", "first_position", "valid_rows", "prefix_key"):
        if getattr(ours, name) != getattr(wanted, name):
            return name
    return "nothing"
