"""Commands in the documents: a ```console block under `<!-- run -->` runs here, line by line; nothing else does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "deploy" / "README.md")
BLOCK = re.compile(r"^(<!-- run(?: needs ([\w.-]+))? -->\n)?```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 60


@dataclass(frozen=True)
class Block:
    """One block; `needs` is a module without which it is skipped."""

    where: str
    needs: str
    commands: tuple[str, ...]
    run: bool


def blocks(text: str, name: str) -> list[Block]:
    """All console blocks. A command begins at `$ ` and goes on over lines that are indented."""
    found = []
    for match in BLOCK.finditer(text):
        commands: list[str] = []
        for line in match.group(3).splitlines():
            if line.startswith("$ "):
                commands.append(line[2:])
            elif line.startswith(" ") and commands:
                commands[-1] += "\n" + line
        where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        found.append(Block(where, match.group(2) or "", tuple(commands), match.group(1) is not None))
    return found


def runnable() -> list[Block]:
    return [
        block
        for document in DOCUMENTS
        for block in blocks(document.read_text(), document.relative_to(ROOT).as_posix())
        if block.run
    ]


@pytest.mark.parametrize("block", runnable(), ids=lambda block: block.where)
def test_the_commands_run(block: Block, tmp_path: Path) -> None:
    if block.needs:
        pytest.importorskip(block.needs)
    done = run(block.commands, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def run(commands: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """In one shell, in an empty folder, with this environment's commands first; the first that fails ends it."""
    script = "\n".join(("set -euo pipefail", *commands))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GENLOCK_")}
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_some_commands_are_run() -> None:
    assert runnable()


def test_every_mark_stands_over_a_block() -> None:
    """A mark that the reader of blocks does not see would be a block that never runs."""
    for document in DOCUMENTS:
        text = document.read_text()
        name = document.relative_to(ROOT).as_posix()
        assert text.count("<!-- run") == sum(block.run for block in blocks(text, name)), name


TEXT = "a\n\n<!-- run needs json -->\n```console\n$ echo a \\\n    b\noutput\n$ false\n```\n\n```console\n$ true\n```\n"


def test_blocks_are_read() -> None:
    first, second = blocks(TEXT, "x.md")
    assert first == Block("x.md:3", "json", ("echo a \\\n    b", "false"), True)
    assert second == Block("x.md:11", "", ("true",), False)


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    for commands in (("true", "false", "true"), ("genlock manifest nothing",), ("false | true",)):
        assert run(commands, tmp_path).returncode != 0
    assert run(("echo a > b", "test -s b"), tmp_path).returncode == 0
