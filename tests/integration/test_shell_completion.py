"""The scripts of `genlock completion`, each in its own shell, at a terminal, by the key that people press."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.main import OK, run

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SHELLS = ("bash", "zsh", "fish")
BASH = ["bash", "--noprofile", "--norc", "-i"]
# What stands before the cursor -> the words that the line then holds.
COMPLETED = {
    "a command": ("genlock sta", ["genlock", "status"]),
    "a command of a group": ("genlock autoscale expl", ["genlock", "autoscale", "explain"]),
    "an option": ("genlock status --outp", ["genlock", "status", "--output"]),
    "a value of an option": ("genlock status --output js", ["genlock", "status", "--output", "json"]),
    "an argument": ("genlock completion fi", ["genlock", "completion", "fish"]),
    "a file of settings": ("genlock config --config sett", ["genlock", "config", "--config", "settings.yaml"]),
    "a file of a cluster": ("genlock apply -f flee", ["genlock", "apply", "-f", "fleet.yaml"]),
    "values of a chart": (
        "genlock manifest render --values laptop-o",
        ["genlock", "manifest", "render", "--values", "laptop-own.yaml"],
    ),
    "a file of a policy": ("genlock autoscale set -f pol", ["genlock", "autoscale", "set", "-f", "policy.yaml"]),
}


class Terminal:
    """A shell that believes that somebody sits before it."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._own, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environ_of(folder),
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def types(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def waits_for(self, pattern: str) -> re.Match[str]:
        """Until it is on the screen; what was there up to its end is taken away."""
        until = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._own], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{pattern} does not come: {self.seen[-2000:]!r}"
            self.seen += os.read(self._own, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        os.close(self._own)


def folder_for(shell: str, folder: Path) -> Path:
    """A folder with a `genlock`, the shell's `script`, and files to complete. Skips where the shell is missing."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    program = folder / "genlock"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cluster.cli.main "$@"\n')
    program.chmod(0o755)
    # Takes the words of the line that it stands before, so that nothing of it runs.
    words = folder / "words"
    words.write_text("#!/bin/sh\nprintf '(%s)' \"$@\"\nprintf '!\\n'\n")
    words.chmod(0o755)
    for name in ("settings.yaml", "fleet.yaml", "policy.yaml", "laptop-own.yaml"):
        (folder / name).touch()
    (folder / "script").write_text(asked(folder, str(program), "completion", shell))
    return folder


def environ_of(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb", "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT), "PS1": "> ",
    }  # fmt: skip


def asked(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environ_of(folder), check=True, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return done.stdout


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    made = Terminal(BASH, folder_for("bash", tmp_path_factory.mktemp("bash")))
    try:
        for line in ("bind 'set enable-bracketed-paste off'", "source ./script", "words ready"):
            made.types(f"{line}\r")
        made.waits_for(r"\(ready\)!")
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("what", COMPLETED)
def test_the_tab_key_completes_in_bash(terminal: Terminal, what: str) -> None:
    typed, words = COMPLETED[what]
    terminal.types(typed + "\t")
    # Shells write the rest of the word only: its last letters show that the key has been answered.
    rest = words[-1].removeprefix(typed.split()[-1])
    terminal.waits_for(re.escape(typed) + r"[\s\S]*?" + re.escape(rest))
    terminal.types("\x01words \r")
    found = terminal.waits_for(r"\(genlock\)(\([^)]*\))*!")
    assert re.findall(r"\(([^)]*)\)", found[0]) == words


# Names of files are fish's own affair: its functions list them.
@pytest.mark.parametrize("what", [what for what, (_, words) in COMPLETED.items() if "yaml" not in words[-1]])
def test_fish_completes(what: str, tmp_path: Path) -> None:
    typed, words = COMPLETED[what]
    folder = folder_for("fish", tmp_path)
    found = asked(folder, "fish", "--no-config", "-c", f'source ./script; complete -C "{typed}"')
    assert words[-1] in [line.split("\t")[0] for line in found.splitlines()]


def test_zsh_takes_its_script(tmp_path: Path) -> None:
    folder = folder_for("zsh", tmp_path)
    script = 'compdef() { print -r -- "$@" }; source ./script; whence -w "_genlock_completion"'
    assert asked(folder, "zsh", "-f", "-c", script).splitlines() == [
        "_genlock_completion genlock", "_genlock_completion: function",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_a_script_of_that_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == OK
    assert "_GENLOCK_COMPLETE" in capsys.readouterr().out
