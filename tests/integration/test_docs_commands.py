"""Commands in the documents: each call of `genlock` parses; a ```console block under `<!-- run -->` runs here, line by
line, and one under `<!-- run at a cluster -->` in tests/integration/test_docs_walk.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documents import (
    DOCUMENTS,
    LIMIT_S,
    MARK,
    Block,
    all_blocks,
    blocks,
    calls,
    check,
    lacks,
    name_of,
    run,
    said,
    unsaid,
)

# What the commands of the documents read.
FILES = {
    "requests.jsonl": '{"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 20}\n'
    '{"at_s": 90, "prompt_tokens": 90, "output_tokens": 40}\n',
    "policy.yaml": "slo: {ttft_ms: 1500}\ndecode: {low: 1, high: 4}\n",
}


def runnable() -> list[Block]:
    return [block for block in all_blocks() if block.run and not block.at]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("block", runnable(), ids=lambda block: block.where)
def test_the_commands_run(block: Block, tmp_path: Path) -> None:
    if why := lacks(block.needs):
        pytest.skip(why)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = run(block.script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_some_commands_are_run() -> None:
    assert runnable()


def test_every_mark_stands_over_a_block() -> None:
    """A mark that the reader of blocks does not see would be a block that never runs."""
    for document in DOCUMENTS:
        text = document.read_text()
        name = name_of(document)
        assert text.count(MARK) == sum(block.run for block in blocks(text, name)), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_of_commands_is_run_or_says_why_not(document: Path) -> None:
    assert unsaid(document.read_text(), name_of(document)) == []


def test_a_block_that_says_nothing_is_seen() -> None:
    said_why = "<!-- not run: builds images -->\n```console\n$ docker build .\n```\n"
    text = f"{said_why}\n```console\n$ true\n```\n\n```\ngenlock status   # hidden\n```\n\n```\nno command\n```\n"
    assert unsaid(text, "x.md") == ["x.md:6", "x.md:10"]
    assert unsaid(said_why.replace(": builds images", ""), "x.md") == ["x.md:2"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_call_of_genlock_parses(document: Path) -> None:
    wrong = [
        f"{one.where}: genlock {' '.join(arguments)}: {problem}"
        for one in said(document.read_text(), name_of(document))
        for arguments in calls(one.line)
        if (problem := check(arguments, mention=one.mention))
    ]
    assert not wrong, "\n".join(wrong)


def test_calls_are_found() -> None:
    text = (
        "Say `genlock scale` or `genlock\n status -o json`.\n\n"
        "```\n$ genlock up\nA=b .venv/bin/genlock chat   # it's talk\n```\n\n"
        "```yaml\ngenlock nothing\n```\n\n    genlock bench guard --json\n"
    )
    found = [(one.where, calls(one.line), one.mention) for one in said(text, "x.md")]
    assert found == [
        ("x.md:5", [["up"]], False),
        ("x.md:6", [["chat"]], False),
        ("x.md:13", [["bench", "guard", "--json"]], False),
        ("x.md:1", [["scale"]], True),
        ("x.md:1", [["status", "-o", "json"]], True),
    ]
    assert calls('helm up "$(genlock manifest chart)" | genlock diff -f - > out.txt 2>&1') == [
        ["manifest", "chart"], ["diff", "-f", "-"],
    ]  # fmt: skip


def test_what_does_not_parse_is_seen() -> None:
    for line in (
        "status",
        "scale decode=2 --wait",
        "autoscale set mode=slo",
        "apply -f no-such.yaml",
        "up --help",
        "get nodes",
    ):
        assert check(line.split()) == ""
    for line in (
        "stats",
        "status --wach",
        "get pods",
        "autoscale unset",
        "status -o csv",
        "scale",
        "soak --requests many",
    ):
        assert check(line.split()), line
    assert check(["scale"], mention=True) == ""
    assert check(["scale", "--all"], mention=True)


TEXT = "a\n\n<!-- run needs json -->\n```console\n$ echo a \\\n    b\noutput\n$ false\n```\n\n```console\n$ true\n```\n"


def test_blocks_are_read() -> None:
    first, second = blocks(TEXT, "x.md")
    assert first == Block("x.md:3", "json", ("echo a \\\n    b", "false"), True)
    assert second == Block("x.md:11", "", ("true",), False)
    (third,) = blocks("<!-- run at a cluster -->\n```python\nprint(1)\n```\n", "x.md")
    assert third == Block("x.md:1", "", ("print(1)\n",), True, at="cluster", python=True)
    (fourth,) = blocks("<!-- run at a registry with a b => c; 100 => 3 -->\n```console\n$ a b 100\n```\n", "x.md")
    assert fourth == Block("x.md:1", "", ("a b 100",), True, at="registry", instead=(("a b", "c"), ("100", "3")))
    assert fourth.script == "set -euo pipefail\nc 3"
    (fifth,) = blocks("<!-- run needs json with 100 => 3 -->\n```console\n$ a 10\n```\n", "x.md")
    assert (fifth.needs, fifth.instead) == ("json", (("100", "3"),))
    with pytest.raises(ValueError, match="100"):
        fifth.script  # noqa: B018  # what is replaced must be there


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    for commands in (("true", "false", "true"), ("genlock manifest nothing",), ("false | true",)):
        assert run(Block("", "", commands, True).script, tmp_path).returncode != 0
    assert run(Block("", "", ("echo a > b", "test -s b"), True).script, tmp_path).returncode == 0
