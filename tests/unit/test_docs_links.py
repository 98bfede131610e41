"""Links between the documents lead somewhere, each page is reached, and generated text is current."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from cluster.config import load
from cluster.openai.openapi import document
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


def script(name: str) -> ModuleType:
    """One of .ci/, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / ".ci" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "page", "there", "wrong"),
    [
        ("api_docs", "api.md", "| `seed` |", "| `sede` |"),
        ("settings_docs", "settings.md", "| `cache.page_tokens` | `32` |", "| `cache.page_tokens` | `33` |"),
    ],
)
def test_references_are_current(name: str, page: str, there: str, wrong: str) -> None:
    module = script(name)
    text = (ROOT / "docs" / page).read_text()
    assert module.current(text) == text, "run: make docs"
    assert there in text
    assert module.current(text.replace(there, wrong)) == text


def test_the_openapi_document_is_current() -> None:
    assert json.loads((ROOT / "docs" / "openapi.json").read_text()) == document(), "run: make docs"


def test_every_setting_has_its_row_with_the_name_that_is_read() -> None:
    rows = re.findall(
        r"^\| `([a-z_.]+)` \|.*\| `(GENLOCK_\w+)` \|$", (ROOT / "docs/settings.md").read_text(), re.MULTILINE
    )
    loaded = load()
    assert [key for key, _variable in rows] == [setting.key for setting in loaded.settings()]
    for key, variable in rows:
        value = next(setting.value for setting in loaded.settings() if setting.key == key)
        if value not in ("", "memory"):
            assert load(environ={variable: str(value)}).sources[key] == variable
