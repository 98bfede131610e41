"""docs/deploy.md says what the chart, the rules and the layouts say."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import click
import pytest
import yaml

from cluster.cli.main import COMMANDS, cli
from cluster.manifests.chart import read_values, values_path
from cluster.manifests.rules import RULES, check
from kvstore.layout import AttentionKind, KvFormat, PageLayout
from tests.support import manifests as support
from tests.support.manifests import group, manifests, need, one

GUIDE = (support.ROOT / "docs" / "deploy.md").read_text()


def rows(after: str) -> list[list[str]]:
    """Cells of the first table after a text."""
    lines = GUIDE.split(after, 1)[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table[2:]


def test_every_rule_is_explained() -> None:
    assert [row[0].strip("`") for row in rows("Each rule stands")] == list(RULES)


def test_every_value_is_explained() -> None:
    values = yaml.safe_load((support.CHART / "values.yaml").read_text())
    text = " ".join(row[0] for row in rows("## Values"))
    assert [key for key in values if f"`{key}" not in text] == []


SHAPES = {
    "SmolLM2-135M": (AttentionKind.GQA, 30, 3, 64, 64),
    "GLM-4.5, 4.6, 4.7": (AttentionKind.GQA, 92, 8, 128, 128),
    "Kimi K2 family": (AttentionKind.MLA, 61, 1, 512, 64),
}


def layout(model: str, kv_format: str, page_tokens: int) -> PageLayout:
    kind, layers, heads, key, value = SHAPES[model]
    if kv_format.startswith("none"):
        return PageLayout("m", kind, layers, heads, key, value, page_tokens, KvFormat.NONE, element="bf16")
    return PageLayout("m", kind, layers, heads, key, value, page_tokens, KvFormat(kv_format))


def test_sizes_are_those_of_the_layouts() -> None:
    table = rows("## Sizes")
    assert len(table) == 5
    for model, kv_format, tokens, page, token in table:
        own = layout(model, kv_format, int(tokens))
        assert int(page.replace(",", "")) == own.slot_bytes
        assert int(token.replace(",", "")) == own.slot_bytes // own.page_tokens


def test_the_formula_is_that_of_the_layouts() -> None:
    for model, (_, layers, heads, key, value) in SHAPES.items():
        for kv_format, element, scale in (("int8", 1, 4), ("none", 2, 0)):
            raw = 128 + layers * heads * 32 * ((key + value) * element + 2 * scale)
            assert layout(model, kv_format, 32).slot_bytes == -(-raw // 64) * 64


def test_the_example_is_right() -> None:
    own = layout("GLM-4.5, 4.6, 4.7", "int8", 64)
    text = " ".join(GUIDE.split("Example, GLM-4.5", 1)[1].split())
    pages = own.pages_for(8192 + 1024)
    assert f"{pages} pages ({pages * own.slot_bytes / 1e9:.2f} GB) a request" in text
    pool = read_values(values_path("h100-8-nodes"))["settings"]["cache"]["decode_pages"]
    assert f"`decode_pages: {pool}` ({pool * own.slot_bytes / 1e9:.0f} GB over 8 GPUs)" in text
    assert f"holds {pool // pages} requests" in text
    prompt = own.pages_for(8192) * own.slot_bytes
    assert f"{prompt / 1e9:.2f} GB on the wire: {prompt / 12.5e9:.2f} s at" in text


@pytest.mark.parametrize(("name", "weights_gb"), [("h100-node", 0), ("h100-8-nodes", 355)])
def test_shipped_pools_fit_the_gpus(name: str, weights_gb: int) -> None:
    """GLM-4.5 with FP8 weights (355 billion parameters) on eight GPUs; on four the pool alone is looked at."""
    values = read_values(values_path(name))
    cache = values["settings"]["cache"]
    slot = layout("GLM-4.5, 4.6, 4.7", "int8", cache["page_tokens"]).slot_bytes
    for role in ("prefill", "decode"):
        pool_gb = cache[f"{role}_pages"] * slot / 1e9
        assert pool_gb + weights_gb < 0.9 * 80 * values[role]["gpus"]


def commands() -> list[str]:
    """Commands of the guide: of console blocks and in backticks."""
    text = re.sub(r"\\\n|\n +(?=\S)", " ", GUIDE)
    quoted = re.findall(r"`((?:genlock|helm|kubectl) [^`\n]+)`", text)
    return [*re.findall(r"^\$ (.+)$", text, re.MULTILINE), *quoted]


def test_genlock_commands_of_the_guide_are_commands() -> None:
    missing = set()
    seen = 0
    for line in commands():
        for words in simple_commands(line):
            if words[:1] != ["genlock"] or len(words) == 1:
                continue
            if words[1] not in COMMANDS:
                missing.add(words[1])
                continue
            seen += 1
            parse(words[1:])
    assert seen > 5
    if missing:
        pytest.skip(f"not part of this version: genlock {', '.join(sorted(missing))}")


def simple_commands(line: str) -> list[list[str]]:
    """The words of each command of a pipe, without what comes of redirections."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in reader:
        if set(word) <= set("();<>|&"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def parse(words: list[str]) -> None:
    """Parses as the command line does and runs nothing."""
    command: click.Command | None = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words:
        command = command.get_command(context, words[0])
        assert command is not None, words
        words = words[1:]
    assert command is not None
    if words:
        command.make_context(command.name, words)


def patched(document: Any, patch: list[dict[str, Any]]) -> None:
    """JSON patch (RFC 6902), as much of it as the guide uses."""
    for step in patch:
        *way, last = [int(part) if part.isdigit() else part for part in step["path"].split("/")[1:]]
        target = document
        for part in way:
            target = target[part]
        if step["op"] == "test":
            assert target[last] == step["value"], step
        else:
            assert step["op"] == "add" or last in target
            target[last] = step["value"]


def test_the_patch_of_the_guide_is_a_scale_down() -> None:
    need("jsonschema")
    text = re.search(r"--type=json -p '(\[.*?\])'", GUIDE, re.DOTALL)
    assert text is not None
    patch = json.loads(text.group(1))
    documents = manifests("h100-8-nodes")
    cluster = one(documents, "RayCluster")
    before = group(documents, "decode")["replicas"]
    patched(cluster, patch)
    decode = group(documents, "decode")
    assert decode["replicas"] == before - 1 == before - len(decode["scaleStrategy"]["workersToDelete"])
    assert support.schema_errors(yaml.safe_load(support.ESSENTIALS.read_text()), cluster) == []
    assert [finding for finding in check(documents) if finding.rule == "replica-bounds"] == []
    cluster["spec"]["workerGroupSpecs"].reverse()
    with pytest.raises(AssertionError):
        patched(cluster, patch)


def test_the_tools_version_is_one() -> None:
    pinned = (support.ROOT / "requirements" / "deploy.txt").read_text()
    version = re.search(r"helm-python-sdk==([\d.]+)", pinned)
    assert version is not None
    assert f"helm-python-sdk=={version.group(1)}" in GUIDE


@pytest.mark.parametrize("name", [name for name in support.SHIPPED if name != support.DEFAULTS])
def test_values_that_ask_for_gpus_say_that_none_is_used(name: str) -> None:
    """As README.md does. Who installs them reads the file, the guide or the notes."""
    path = values_path(name)
    asks = any(read_values(path).get(role, {}).get("gpus", 0) for role in ("prefill", "decode"))
    assert ("does not serve on GPUs" in path.read_text()) == asks
    assert "serving on a GPU is not wired up" in (support.ROOT / "README.md").read_text()
    assert "**This version does not serve on GPUs.**" in GUIDE.split("## H100 nodes")[1].split("\n## ")[0]
    assert "this version does not serve on them" in (support.CHART / "templates" / "NOTES.txt").read_text()
