"""docs/sizing.md says what the layouts and the settings say."""

from __future__ import annotations

import math

from cluster.settings import CacheConfig, WorkersConfig
from kvstore.layout import AttentionKind, KvFormat, PageLayout
from tests.support.documents import ROOT

TEXT = (ROOT / "docs" / "sizing.md").read_text()


def rows(head: str) -> list[list[str]]:
    """Cells of the table whose head begins with a text."""
    lines = TEXT.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {head}"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().replace(",", "") for cell in line.strip("|").split("|")])
    assert table
    return table


def smollm2(kv_format: str = "int8", page_tokens: int = 32) -> PageLayout:
    return PageLayout("m", AttentionKind.GQA, 30, 3, 64, 64, page_tokens, KvFormat(kv_format))


def test_pages() -> None:
    for _, layers, heads, key, value, kv_format, tokens, page, token in rows("model | l"):
        shape = [int(cell) for cell in (layers, heads, key, value, tokens)]
        layout = PageLayout("m", AttentionKind.GQA, *shape, KvFormat(kv_format))
        assert int(page) == layout.slot_bytes
        assert int(token) == layout.slot_bytes // layout.page_tokens
        element, scale = (1, 4) if kv_format == "int8" else (4, 0)
        raw = 128 + shape[0] * shape[1] * shape[4] * ((shape[2] + shape[3]) * element + 2 * scale)
        assert -(-raw // 64) * 64 == layout.slot_bytes


def test_concurrency() -> None:
    cache, layout = CacheConfig(), smollm2()
    assert (cache.page_tokens, cache.kv_format) == (layout.page_tokens, "int8")
    assert f"pools of {cache.decode_pages:,} pages (decode) and {cache.prefill_pages} (prefill)" in TEXT
    for row in rows("prompt | answer"):
        prompt, answer, pages, held, pool, wire = map(int, row)
        assert pages == layout.pages_for(prompt + answer)
        assert held == cache.decode_pages // pages
        assert pool == cache.decode_pages * layout.slot_bytes
        assert wire == layout.pages_for(prompt) * layout.slot_bytes
    assert f"`workers.max_running: {WorkersConfig().max_running}`" in TEXT


def test_prefill_to_decode() -> None:
    for row in rows("requests a second"):
        rate, prompt, cached, answer, prefill_speed, decode_speed, prefill, decode = (
            int(cell.removesuffix(" %")) for cell in row
        )
        assert prefill == math.ceil(rate * prompt * (100 - cached) / 100 / prefill_speed)
        assert decode == math.ceil(rate * answer / decode_speed)


def test_network() -> None:
    for model, token, speed, need in rows("model | bytes of a token"):
        layout = smollm2(model.split()[-1])
        assert int(token) == layout.slot_bytes // layout.page_tokens
        assert need == f"{int(token) * int(speed) * 8 / 1e9:.2f} Gbit/s"
