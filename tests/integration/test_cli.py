"""The command line against a cluster of scripted workers in another process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from cluster.cli.main import FAILED, OK, TIMED_OUT, UNREACHABLE, USAGE, run

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


@contextmanager
def fake_cluster(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, in a process group of its own as in a terminal, and its endpoint."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_cluster", *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        assert ready, "the cluster did not start"
        endpoint = process.stdout.readline().strip()
        assert endpoint.startswith("127.0.0.1:"), process.communicate(timeout=5)[1]
        yield process, endpoint
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with fake_cluster("here") as (_process, endpoint):
        yield endpoint


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GENLOCK_"):
            monkeypatch.delenv(name)


def test_generate_streams_text_to_stdout_and_facts_to_stderr(endpoint: str, capsys):
    assert run(["generate", "hello", "--raw", "--max-tokens", "4", "--endpoint", endpoint]) == OK
    out, err = capsys.readouterr()
    assert out == "hell\n"
    assert "5 + 4 tokens (length)" in err
    assert "prefill-0 → decode-0" in err


def test_generate_sends_a_user_message_by_default(endpoint: str, capsys):
    assert run(["generate", "hi", "--system", "be brief", "--endpoint", endpoint]) == OK
    assert capsys.readouterr().out == "system:be brief\nuser:hi\n\n"


def test_generate_as_json(endpoint: str, capsys):
    args = ["generate", "hello", "--raw", "--n", "2", "--logprobs", "1", "--stop", "l", "-o", "json"]
    assert run([*args, "--endpoint", endpoint]) == OK
    document = json.loads(capsys.readouterr().out)
    assert [choice["text"] for choice in document["choices"]] == ["he", "he"]
    first = document["choices"][0]
    assert first["token_ids"] == list(b"he")
    assert [entry["text"] for entry in first["logprobs"]] == ["h", "e"]
    assert first["finished"]["matched_stop"] == "l"
    assert first["finished"]["finish_reason"] == "FINISH_REASON_STOP"
    assert len(document["server_id"]) == 16


def test_generate_without_streaming_and_with_logprobs(endpoint: str, capsys):
    assert run(["generate", "abc", "--raw", "--no-stream", "--logprobs", "0", "--endpoint", endpoint]) == OK
    out = capsys.readouterr().out
    assert out.startswith("abc\n")
    assert "-0.500" in out


def test_several_answers_are_shown_apart(endpoint: str, capsys):
    assert run(["generate", "abc", "--raw", "--n", "2", "--endpoint", endpoint]) == OK
    assert capsys.readouterr().out == "--- 0\nabc\n--- 1\nabc\n"


def test_bad_input_names_the_field_and_is_wrong_usage(endpoint: str, capsys):
    assert run(["generate", "x", "--top-p", "0", "--endpoint", endpoint]) == USAGE
    assert "sampling_params.top_p must be in (0.0, 1.0]" in capsys.readouterr().err
    assert run(["generate", "x", "--top-k", str(1 << 40), "--endpoint", endpoint]) == USAGE


def test_nobody_there_is_said_with_the_way_out(capsys):
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", "--timeout", "0.3"]) == UNREACHABLE
    err = capsys.readouterr().err
    assert "no cluster at 127.0.0.1:1" in err
    assert "genlock up" in err
    assert run(["status", "--endpoint", "127.0.0.1:1", "--timeout", "0.3"]) == UNREACHABLE


def test_the_default_endpoint_follows_the_settings(capsys, monkeypatch):
    monkeypatch.setenv("GENLOCK_API_PORT", "1")
    assert run(["status", "--timeout", "0.3"]) == UNREACHABLE
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_status_as_table_and_as_json(endpoint: str, capsys):
    assert run(["status", "--endpoint", endpoint]) == OK
    out = capsys.readouterr().out
    assert "decode-0" in out
    assert "READY" in out
    assert run(["status", "--endpoint", endpoint, "-o", "json"]) == OK
    document = json.loads(capsys.readouterr().out)
    assert [worker["state"] for worker in document["workers"]] == ["READY", "READY"]
    assert document["workers"][0]["status"]["pool"]["pages"] == 10
    assert isinstance(document["uptime_ms"], int)


def test_chat_keeps_the_talk_and_survives_an_error(endpoint: str):
    lines = "a\n" + "x" * 400 + "\nb\n/reset\nc\n/exit\n"
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", "chat", "--max-tokens", "100", "--endpoint", endpoint],
        cwd=ROOT, input=lines, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert "prompt_too_long" in done.stderr
    # The scripted model repeats its prompt: the second answer holds the first turn, the one after /reset does not.
    assert done.stdout.split("user:c")[0].count("user:a") == 3
    assert done.stdout.endswith("user:c\n\n")


def test_config_tells_values_and_sources(capsys, monkeypatch, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("cache: {page_tokens: 64}\n")
    monkeypatch.setenv("GENLOCK_WORKERS_DECODE", "2")
    args = ["config", "--config", str(file), "--set", "api.port=0", "--set", "cluster.secret=" + "ab" * 32]
    assert run([*args, "-o", "json"]) == OK
    out = capsys.readouterr().out
    document = json.loads(out)
    assert document["cache.page_tokens"] == {**document["cache.page_tokens"], "value": 64, "source": f"file {file}"}
    assert document["workers.decode"]["source"] == "GENLOCK_WORKERS_DECODE"
    assert document["api.port"]["source"] == "flag"
    assert "abab" not in out
    assert run([*args, "-o", "yaml"]) == OK
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert yaml.safe_load(again.read_text())["cache"]["page_tokens"] == 64
    assert run(["config", "--config", str(again)]) == OK
    assert run(["config", "--set", "cache.page_token=3"]) == USAGE
    assert "did you mean cache.page_tokens?" in capsys.readouterr().err
    assert run(["config", "--config", str(tmp_path / "none.yaml")]) == USAGE


def test_help_is_quick_to_load_and_shows_examples(capsys):
    for name in ("up", "demo", "generate", "chat", "status", "config"):
        assert run([name, "--help"]) == OK
        assert f"genlock {name}" in capsys.readouterr().out
    # What makes a start slow must not be loaded by looking for help, nor by a client.
    code = (
        "import sys; from cluster.cli.main import run; run(['--help']); run(['generate', '--help']); run(['config']);"
        "bad = {'torch', 'ray', 'grpc', 'numba'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_commands_are_wrong_usage(capsys):
    assert run(["nonsense"]) == USAGE
    assert "No such command" in capsys.readouterr().err


def test_a_timeout_has_its_own_code():
    with fake_cluster("here", "hang") as (process, endpoint):
        assert run(["generate", "x", "--timeout", "0.5", "--endpoint", endpoint]) == TIMED_OUT
        # The cluster stops under a running request: the answer fails, it does not end as if it were complete.
        client = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.main", "generate", "x", "--endpoint", endpoint],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert client.stdout.read(1) == "x"
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None, "the first Ctrl-C drains"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
        _out, err = client.communicate(timeout=LIMIT_S)
        assert client.returncode == FAILED, err


def processes_of_session(session: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == session:
                found.append((path / "cmdline").read_bytes()[:80].decode("utf-8", "replace"))
        except OSError:
            continue
    return found


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_ctrl_c_in_a_terminal_stops_a_cluster_on_ray_and_leaves_nothing(capsys):
    """A terminal sends the signal to the whole process group, Ray's processes included."""
    with fake_cluster("ray") as (process, endpoint):
        assert run(["generate", "hello", "--raw", "--endpoint", endpoint]) == OK
        assert capsys.readouterr().out == "hello\n"
        os.killpg(process.pid, signal.SIGINT)
        _out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert "Stopped." in err
        assert "Traceback" not in err
        deadline = time.monotonic() + 10
        while processes_of_session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of_session(process.pid) == []
