"""Files that settings and options name: whatever is wrong with one, the answer is typed and names it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from cluster.cli.main import USAGE, run
from cluster.launch.controlling import ControllerService
from cluster.launch.launcher import Launcher
from kvstore.errors import InvalidInput
from kvstore.files import MAX_FILE_BYTES, FileReader
from tests.support.fake_workers import config

READER = FileReader("bad_list", "lists.file", limit=64, advice="name another")
LARGEST = 256 << 20


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GENLOCK_"):
            monkeypatch.delenv(name)


def _missing(path: Path) -> None:
    assert not path.exists()


def _folder(path: Path) -> None:
    path.mkdir()


def _no_text(path: Path) -> None:
    path.write_bytes(b"a: \xff\n")


def _too_large(path: Path) -> None:
    path.touch()
    # Has no blocks on the disk.
    os.truncate(path, LARGEST + 1)


WRONG = {"missing": _missing, "folder": _folder, "no text": _no_text, "too large": _too_large}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_cannot_be_read(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    WRONG[wrong](path)
    with pytest.raises(InvalidInput) as raised:
        READER.text(path)
    assert (raised.value.reason, raised.value.field) == ("bad_list", "lists.file")
    assert raised.value.message.startswith(f"{path} cannot be read: ")
    assert raised.value.message.endswith("; name another")


def test_a_path_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        READER.text("a\0b")


def test_text_bytes_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_bytes(b"a\r\nb\rc\n" + b"d" * 57)
    assert READER.text(path) == "a\nb\nc\n" + "d" * 57
    assert READER.data(path) == path.read_bytes()
    path.write_bytes(b"\xff" * 65)
    with pytest.raises(InvalidInput, match="longer than 64 bytes"):
        READER.data(path)
    path.write_bytes(b"\xff" * 64)
    assert READER.data(path) == b"\xff" * 64


def test_a_pipe_is_read_to_its_end_and_no_further_than_the_limit() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"a: 1\n")
        os.close(write)
        assert READER.text(f"/dev/fd/{read}") == "a: 1\n"
    finally:
        os.close(read)
    with pytest.raises(InvalidInput, match="longer than"):
        READER.text("/dev/zero")


# Command lines that read a file before they need anything else.
COMMANDS: dict[str, Callable[[str], Sequence[str]]] = {
    "controller": lambda path: ["controller", "--set", f"api.tenants_file={path}"],
    "settings": lambda path: ["controller", "--config", path],
    "apply": lambda path: ["apply", "-f", path],
    "diff": lambda path: ["diff", "-f", path],
    "policy": lambda path: ["autoscale", "set", "-f", path],
    "simulated policy": lambda path: ["autoscale", "simulate", "--trace", "bursty", "--policy", path],
    "trace": lambda path: ["autoscale", "simulate", "--trace", path],
    "manifest": lambda path: ["manifest", "check", path],
    "values": lambda path: ["manifest", "values", path],
}
OWN_WORDS = {
    ("trace", "missing"): "no trace",
    ("settings", "folder"): "is a directory",  # click's
    ("manifest", "folder"): "is a directory",
    ("values", "missing"): "is no file",
    ("values", "folder"): "is no file",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_file(
    command: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    WRONG[wrong](Path("given"))
    assert run(COMMANDS[command]("given")) in (USAGE, 1)
    assert OWN_WORDS.get((command, wrong), "given cannot be read: ") in capsys.readouterr().err


@pytest.mark.parametrize("wrong", WRONG)
def test_a_list_of_authorities_that_cannot_be_read(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ca.crt"
    WRONG[wrong](path)
    monkeypatch.setenv("GENLOCK_CA", str(path))
    code = run(["status", "--endpoint", "127.0.0.1:1", "--timeout", "0.2"])
    told = capsys.readouterr().err
    if wrong == "no text":  # whether bytes are certificates is for the TLS library
        assert "bad_ca_file" not in told
    else:
        assert code == USAGE
        assert "GENLOCK_CA names it" in told


@pytest.mark.parametrize(
    ("command", "reason", "most"),
    [
        (["apply", "-f", "-"], "bad_cluster_file", MAX_FILE_BYTES),
        (["manifest", "check", "-"], "bad_manifest", 16 << 20),
        (["generate", "-"], "bad_prompt", 16 << 20),
        (["keys", "digest"], "bad_token", 16 << 10),
    ],
)
def test_stdin_has_the_same_limits(
    command: Sequence[str], reason: str, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for data in (b"\xff", b"a" * (most + 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        assert run(command) == USAGE
        told = capsys.readouterr().err
        assert "stdin cannot be read" in told
        assert reason in told


@pytest.mark.parametrize("text", ["", "\n", "tenants: {}", "tenants: [a]"])
def test_a_controller_takes_no_list_without_tenants(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    assert run(["controller", "--set", f"api.tenants_file={path}"]) == USAGE
    assert "bad_tenants_file" in capsys.readouterr().err


def test_an_empty_list_lets_nobody_into_a_controller() -> None:
    settings = config(
        api__tenants_file="/etc/tenants.yaml", registry__url="redis://127.0.0.1:1/0", cluster__secret="ab" * 16,
        control__ray_address="auto",
    )  # fmt: skip
    with pytest.raises(InvalidInput) as raised:
        ControllerService(settings, cast(Launcher, None), "")
    assert raised.value.reason == "bad_tenants_file"
