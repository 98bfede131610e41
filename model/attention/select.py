"""Attention backends by name."""

from __future__ import annotations

from typing import Protocol

from kvstore import formats
from kvstore.errors import InvalidInput
from kvstore.layout import AttentionKind, KvFormat, PageLayout
from model.attention.base import AttentionBackend

BACKENDS = ("auto", "reference", "cpu", "triton")


class WarmBackend(AttentionBackend, Protocol):
    """A backend that can pay its compile time before the first request."""

    def warm_up(self, layout: PageLayout) -> None: ...


def make_backend(name: str, layout: PageLayout) -> WarmBackend:
    """Returns the backend `name` for pages of `layout`; call its `warm_up(layout)` before serving.

    `auto` takes `cpu`; for layouts that it refuses, `reference`. Not `triton`, also where there is a GPU: pools lie in
    host memory, which its kernels cannot read.
    Raises InvalidInput: `attention_backend` (unknown name, or Triton is not installed) or `layout.*` (the named
    backend cannot serve that field).
    """
    if name == "auto":
        name = _automatic(layout)
    # Imports are here because each backend loads a compiler of its own.
    if name == "reference":
        from model.attention.reference import ReferenceBackend

        return ReferenceBackend(layout)
    if name == "cpu":
        from model.attention.cpu import CpuBackend

        return CpuBackend(layout)
    if name == "triton":
        from model.attention.gpu import TritonBackend

        return TritonBackend(layout)
    raise InvalidInput(
        "unknown_backend",
        f"attention_backend must be one of {', '.join(BACKENDS)}, not {name!r}",
        field="attention_backend",
    )


def _automatic(layout: PageLayout) -> str:
    formats.require_working(layout)
    if layout.kind is not AttentionKind.GQA:
        return "reference"
    return "cpu" if layout.kv_format is not KvFormat.NONE or layout.element == "fp32" else "reference"
