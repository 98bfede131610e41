"""Reads the documents: blocks that are marked to be run, commands of `genlock`, links, headings."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from cluster.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "deploy" / "README.md")
MARK = "<!-- run"
# `with A => B; C => D`: what is run is a shorter variant, or one that fits the cluster of the tests.
BLOCK = re.compile(
    r"^(<!-- run(?: needs ([\w.-]+))?(?: at a (cluster|registry|model|checkout|kubernetes))?(?: with (.+?))? -->\n)?"
    r"```(console|python)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# A block that no test runs says so, and why.
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")
# Lines of a plain block that are commands all the same.
COMMAND = re.compile(
    r"^(\$ |([A-Z_]+=\S+ )*(\.venv/bin/)?(curl|docker|export|genlock|helm|kubectl|make|pip|python|ray) )", re.M
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 300
# Blocks in these languages hold no commands.
DATA = ("yaml", "python", "json", "toml")


@dataclass(frozen=True)
class Block:
    """One block of commands, or of Python. `needs` is a module or a program without which it is skipped; `at`: what it
    is run at: a `cluster` of scripted workers or a `model` (the default one, really served) at the default ports, a
    `registry` that cluster.yaml names, a `checkout` with its environment, a `kubernetes` for kubectl; `instead`: what
    is replaced in the commands when they are run."""

    where: str
    needs: str
    commands: tuple[str, ...]
    run: bool
    at: str = ""
    python: bool = False
    instead: tuple[tuple[str, str], ...] = ()

    @property
    def at_cluster(self) -> bool:
        return self.at == "cluster"

    @property
    def script(self) -> str:
        """Raises ValueError where something is to be replaced that is not there."""
        text = "\n".join(self.commands)
        for said, done in self.instead:
            if said not in text:
                raise ValueError(f"{self.where}: nothing reads {said!r}")
            text = text.replace(said, done)
        return text if self.python else f"set -euo pipefail\n{text}"


def lacks(needs: str) -> str:
    """Why a block with this need cannot run here; empty: it can."""
    if not needs or shutil.which(needs, path=search_path()) or importlib.util.find_spec(needs):
        return ""
    return f"{needs} is not installed"


def search_path() -> str:
    """This environment's commands first."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def bare(command: str) -> str:
    """A command without what is said beside it."""
    return re.sub(r" {2,}#.*$", "", command, flags=re.MULTILINE).rstrip()


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(text: str, name: str) -> list[Block]:
    """All blocks of commands and of Python. A command begins at `$ ` and goes on over lines that are indented."""
    found = []
    for match in BLOCK.finditer(text):
        mark, needs, at, changes, language, body = match.groups()
        where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        commands = (body,) if language == "python" else tuple(console(body))
        pairs = [change.partition(" => ") for change in changes.split("; ")] if changes else []
        instead = tuple((said, done) for said, _arrow, done in pairs)
        found.append(Block(where, needs or "", commands, mark is not None, at or "", language == "python", instead))
    return found


def console(body: str) -> list[str]:
    commands: list[str] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
        elif line.startswith(" ") and commands:
            commands[-1] += "\n" + line
    return commands


def unsaid(text: str, name: str) -> list[str]:
    """Where a document shows commands that are not marked to be run, without saying why not."""
    unmarked = [one.start() for one in BLOCK.finditer(text) if one.group(1) is None]
    silent = [at for at in unmarked if not NOT_RUN.search(text[:at])]
    plain = [one for one in FENCE.finditer(text) if one.group(1) not in (*DATA, "console")]
    hidden = [one.start() for one in plain if COMMAND.search(one.group(2))]
    return [f"{name}:{text.count(chr(10), 0, at) + 1}" for at in sorted(silent + hidden)]


def all_blocks() -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document.read_text(), name_of(document))]


def run(script: str, folder: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In one shell, with this environment's commands first; the first that fails ends it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GENLOCK_")}
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=clean | {"PATH": search_path()} | dict(environ or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@dataclass(frozen=True)
class Said:
    """A command line that a document shows. `mention`: named in a sentence, perhaps without its arguments."""

    where: str
    line: str
    mention: bool = False


_GENLOCK = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?genlock +\S")
# What stands beside a command, after a gap, is about it.
_BESIDE = re.compile(r" {3,}.*$")


def said(text: str, name: str) -> list[Said]:
    """Each command line of a document that calls `genlock`: in console blocks, in plain blocks, in backticks."""
    found: list[Said] = []

    def add(source: str, at: int, line: str, *, mention: bool = False) -> None:
        if calls(line):
            found.append(Said(f"{name}:{source.count(chr(10), 0, at) + 1}", line, mention))

    for match in FENCE.finditer(text):
        language, body = match.groups()
        if language == "console":
            for command in console(body):
                add(text, match.start(), command.replace("\\\n", " "))
        elif language not in DATA:
            for line in re.finditer(r"^\$? ?(.+)$", body, re.MULTILINE):
                if _GENLOCK.match(line.group(1)):
                    add(text, match.start(2) + line.start(), _BESIDE.sub("", line.group(1)))
    prose = FENCE.sub(lambda match: "\n" * match.group().count("\n"), text)
    for line in re.finditer(r"^ {4,}(.+)$", prose, re.MULTILINE):
        if _GENLOCK.match(line.group(1)):
            add(prose, line.start(), _BESIDE.sub("", line.group(1)))
    for span in re.finditer(r"`([^`]+)`", prose):
        # Of alternatives in a table the first one is looked at.
        words = re.sub(r"\\\|\S*", "", " ".join(span.group(1).split()))
        if _GENLOCK.match(words):
            add(prose, span.start(), words, mention=True)
    return found


def calls(line: str) -> list[list[str]]:
    """The arguments of each call of `genlock` in a shell command, those in $(...) too."""
    inner = [words for nested in re.findall(r"\$\(([^()]*)\)", line) for words in calls(nested)]
    plain = re.sub(r" \d>", " >", re.sub(r" \d?>&\d", "", re.sub(r"\$\([^()]*\)", "value", line)))
    reader = shlex.shlex(plain, posix=True, punctuation_chars="();<>|&")
    reader.whitespace_split = True
    found: list[list[str]] = [[]]
    skip = False
    for word in reader:
        if word and set(word) <= set("();<>|&"):
            # What a redirection names is no argument.
            skip = set(word) <= set("<>")
            if not skip:
                found.append([])
        elif skip:
            skip = False
        else:
            found[-1].append(word)
    return inner + [words for words in map(_arguments, found) if words is not None]


def _arguments(words: list[str]) -> list[str] | None:
    rest = list(words)
    while rest and re.fullmatch(r"[A-Z_]+=.*", rest[0]):
        rest.pop(0)
    return rest[1:] if rest and Path(rest[0]).name == "genlock" else None


def check(arguments: list[str], *, mention: bool = False) -> str:
    """What is wrong with a call of `genlock`; empty when it parses. Nothing is run."""
    command: click.Command = cli
    context: click.Context | None = None
    name = "genlock"
    try:
        while True:
            context = command.make_context(name, list(arguments), parent=context)
            if not isinstance(command, click.Group):
                return ""
            # The public name of this is deprecated, and nothing stands in its place yet.
            rest = [*context._protected_args, *context.args]
            if not rest:
                return ""
            _, found, arguments = command.resolve_command(context, rest)
            if found is None:
                return "no such command"
            command, name = found, found.name or ""
    except click.exceptions.Exit:
        return ""
    except click.exceptions.NoArgsIsHelpError:
        return "" if mention else "a command is missing"
    except click.MissingParameter as error:
        return "" if mention else error.format_message()
    except click.BadOptionUsage as error:
        return "" if mention and "requires an argument" in error.message else error.format_message()
    except click.BadParameter as error:
        # Files of an example need not be there.
        return "" if "does not exist" in error.format_message() else error.format_message()
    except click.ClickException as error:
        return error.format_message()


def slugs(text: str) -> list[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        again = found.count(slug)
        found.append(f"{slug}-{again}" if again else slug)
    return found


def links(text: str) -> list[str]:
    """Targets of a document's links that lead to files or headings of this repository."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    targets = re.findall(r"\]\(([^()\s]+)\)", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken(target: str, document: Path) -> str:
    """Why a link leads nowhere; empty when it does not."""
    path, _, anchor = target.partition("#")
    place = (document.parent / path).resolve() if path else document
    if not place.is_relative_to(ROOT) or not place.exists():
        return f"{target}: no such file"
    if anchor and place.suffix == ".md" and anchor not in slugs(place.read_text()):
        return f"{target}: no such heading"
    return ""
