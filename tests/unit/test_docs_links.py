"""Links between the documents lead somewhere, each page is reached, and generated text is current."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, ROOT, broken, links, name_of, slugs

INDEX = (ROOT / "README.md", ROOT / "docs" / "index.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    wrong = [problem for target in links(document.read_text()) if (problem := broken(target, document))]
    assert not wrong, "\n".join(wrong)


def test_every_page_is_linked() -> None:
    reached = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in INDEX
        for target in links(page.read_text())
        if not target.startswith("#")
    }
    lost = [name_of(page) for page in (ROOT / "docs").glob("*.md") if page not in reached]
    assert sorted(lost) in ([], ["docs/index.md"]), f"add to docs/index.md: {lost}"


def test_what_leads_nowhere_is_seen() -> None:
    readme = ROOT / "README.md"
    text = "[a](docs/nothing.md) [b](docs/architecture.md#words) ![c](https://x.y) `[d](e)`\n```\n[f](g)\n```\n"
    assert links(text) == ["docs/nothing.md", "docs/architecture.md#words"]
    assert [bool(broken(target, readme)) for target in links(text)] == [True, False]
    assert broken("docs/architecture.md#no-words", readme)
    assert broken("/etc/passwd", readme)
    assert slugs("# What it `does`, now\n## A\n## A\n") == ["what-it-does-now", "a", "a-1"]


def test_the_api_reference_is_current() -> None:
    loader = importlib.machinery.SourceFileLoader("api_docs", str(ROOT / ".ci" / "api_docs"))
    spec = importlib.util.spec_from_loader("api_docs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    text = (ROOT / "docs" / "api.md").read_text()
    assert module.current(text) == text, "run: make docs"
    assert module.current(text.replace("| `seed` |", "| `sede` |")) == text
