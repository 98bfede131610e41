"""What a page's bytes mean. Two pools may exchange pages only if their layouts have one fingerprint.

A page is one contiguous slot:

    [ header 128 B | layer 0: stream 0 codes, stream 0 scales, stream 1 codes, ... | layer 1: ... | pad to 64 B ]

GQA has two streams a layer: `key` and `value`, each [kv_heads, page_tokens, head_dim] (head-major).
MLA has two: `latent` [1, page_tokens, kv_lora_rank] and `rope` [1, page_tokens, rope_dim]; values are the latent.
Scales are fp32, one per (head, token) row: [heads, page_tokens]. The `none` format has no scales.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property

from kvstore.errors import InvalidInput, LayoutMismatch
from kvstore.json_text import parse_json

HEADER_BYTES = 128
SLOT_ALIGN_BYTES = 64
MAX_PAGE_TOKENS = 1024
MAX_DIMENSION = 1 << 20
MAX_SLOT_BYTES = 1 << 30
MAX_TEXT = 512


class AttentionKind(StrEnum):
    GQA = "gqa"
    MLA = "mla"


class KvFormat(StrEnum):
    """How KV elements are kept in a page. FP8 and INT4 are named here and refused until their codecs exist."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


WORKING_FORMATS = frozenset({KvFormat.NONE, KvFormat.INT8})


class HeadOrder(StrEnum):
    HEAD_MAJOR = "head_major"
    TOKEN_MAJOR = "token_major"


@dataclass(frozen=True)
class Stream:
    """One stream of a layer. Offsets are bytes from the start of the layer; `scale_bytes` is 0 for `none`."""

    name: str
    heads: int
    width: int
    codes_offset: int
    codes_bytes: int
    scales_offset: int
    scale_bytes: int


@dataclass(frozen=True)
class PageLayout:
    """Describes one rank's pages. Every field is part of the fingerprint.

    `key_width`/`value_width` are head_dim for GQA; for MLA they are kv_lora_rank and the rope width.
    `element` is the stored type of the `none` format: fp32, fp16 or bf16.
    """

    model: str
    kind: AttentionKind
    layers: int
    kv_heads: int
    key_width: int
    value_width: int
    page_tokens: int
    kv_format: KvFormat = KvFormat.INT8
    element: str = "fp32"
    scale_type: str = "fp32_per_head_token"
    order: HeadOrder = HeadOrder.HEAD_MAJOR
    tp_rank: int = 0
    tp_size: int = 1
    version: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_type(field.name, getattr(self, field.name))
        for name in ("layers", "kv_heads", "key_width", "value_width", "page_tokens", "tp_size", "version"):
            if not 1 <= getattr(self, name) <= MAX_DIMENSION:
                raise _bad(name, f"must be 1 to {MAX_DIMENSION}")
        if self.page_tokens > MAX_PAGE_TOKENS or self.page_tokens % 4:
            raise _bad("page_tokens", f"must be a multiple of 4 up to {MAX_PAGE_TOKENS}")
        if self.kind is AttentionKind.MLA and self.kv_heads != 1:
            raise _bad("kv_heads", "must be 1: an MLA layout has one latent head")
        if self.element not in _ELEMENT_BYTES:
            raise _bad("element", f"{self.element!r} is unknown")
        if not 0 <= self.tp_rank < self.tp_size:
            raise _bad("tp_rank", f"must be 0 to tp_size - 1, which is {self.tp_size - 1}")
        if self.slot_bytes > MAX_SLOT_BYTES:
            raise _bad("page_tokens", f"makes pages of {self.slot_bytes} bytes; at most {MAX_SLOT_BYTES} are possible")

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored code."""
        return 1 if self.kv_format is not KvFormat.NONE else _ELEMENT_BYTES[self.element]

    @property
    def has_scales(self) -> bool:
        return self.kv_format is not KvFormat.NONE

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        names = ("key", "value") if self.kind is AttentionKind.GQA else ("latent", "rope")
        out: list[Stream] = []
        offset = 0
        for name, width in zip(names, (self.key_width, self.value_width), strict=True):
            codes = self.kv_heads * self.page_tokens * width * self.element_bytes
            scales = self.kv_heads * self.page_tokens * 4 if self.has_scales else 0
            out.append(Stream(name, self.kv_heads, width, offset, codes, offset + codes, scales))
            offset += codes + scales
        return tuple(out)

    @cached_property
    def layer_bytes(self) -> int:
        last = self.streams[-1]
        return last.scales_offset + last.scale_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one page: header, layers, padding."""
        raw = HEADER_BYTES + self.layers * self.layer_bytes
        return -(-raw // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_tokens)

    def canonical(self) -> str:
        """Canonical JSON of all fields; what the fingerprint hashes and what peers exchange."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def fingerprint(self) -> int:
        """63-bit fingerprint, also written into every page header."""
        return int.from_bytes(hashlib.blake2b(self.canonical().encode(), digest_size=8).digest(), "little") >> 1


_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_ENUMS: dict[str, type[StrEnum]] = {"kind": AttentionKind, "kv_format": KvFormat, "order": HeadOrder}
_TEXTS = ("model", "element", "scale_type")


def _bad(name: str, message: str) -> InvalidInput:
    return InvalidInput("bad_layout", f"layout.{name} {message}", field=f"layout.{name}")


def _require_type(name: str, value: object) -> None:
    """Strict: a fraction, a bool or an enum's bare text would give another fingerprint to the same pages."""
    wanted = _ENUMS.get(name, str if name in _TEXTS else int)
    if type(value) is not wanted:
        raise _bad(name, f"must be of type {wanted.__name__}, not {type(value).__name__}")
    if isinstance(value, str) and not 1 <= len(value) <= MAX_TEXT:
        raise _bad(name, f"must have 1 to {MAX_TEXT} characters")


def layout_from_canonical(text: str) -> PageLayout:
    """Parses a peer's `canonical()` text. Raises InvalidInput naming an unknown, missing or impossible field."""
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise InvalidInput("bad_layout", "the peer's layout is not JSON", field="layout") from error
    if not isinstance(raw, dict):
        raise InvalidInput("bad_layout", "the peer's layout is not a JSON object", field="layout")
    known = {f.name for f in fields(PageLayout)}
    for name in sorted(known ^ set(raw)):
        raise _bad(name, "is missing" if name in known else "is unknown")
    for name, kind in _ENUMS.items():
        if raw[name] not in list(kind):
            raise _bad(name, f"must be one of {', '.join(kind)}")
        raw[name] = kind(raw[name])
    return PageLayout(**raw)


def require_same_layout(ours: PageLayout, theirs: PageLayout) -> None:
    """Raises LayoutMismatch naming the first differing field."""
    for field in fields(PageLayout):
        mine, peer = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != peer:
            raise LayoutMismatch(
                "layout_mismatch",
                f"page layouts differ in {field.name}: ours {mine}, the peer's {peer}",
                field=f"layout.{field.name}",
            )
