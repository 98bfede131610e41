"""`genlock up --tls`, from the command line: what it makes, and who gets in."""

from __future__ import annotations

import os
import select
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.cli.main import OK, UNREACHABLE

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0
CERTS = {"ca.crt", "tls.crt", "tls.key"}


def genlock(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", *args], cwd=ROOT, env=clean(**environment), capture_output=True,
        text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def clean(**environment: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GENLOCK_")} | environment


@contextmanager
def up(*args: str, **environment: str) -> Iterator[tuple[str, str]]:
    """The two lines that `genlock up --tls` prints on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli.main", "up", "--tls", "--in-process", "--model", "probe", "--port", "0",
         "--http-port", "0", "--set", "cache.page_tokens=16", *args],
        cwd=ROOT, env=clean(**environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT_S)[0], "the cluster did not start"
        yield process.stdout.readline().strip(), process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert "export GENLOCK_CA=" in err
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.timeout(240)
def test_both_doors_speak_tls_and_let_in_who_trusts_the_ca_that_was_made(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert genlock("certs", "--out", str(other)).returncode == OK
    with up("--tls-folder", str(own)) as (endpoint, url):
        assert {path.name for path in own.iterdir()} >= CERTS
        trusting = {"GENLOCK_CA": str(own / "ca.crt")}
        answered = genlock("generate", "hello", "--raw", "--max-tokens", "3", "--endpoint", endpoint, **trusting)
        assert answered.returncode == OK, answered.stderr
        assert genlock("status", "--endpoint", endpoint, **trusting).returncode == OK
        for stranger, told in (({}, "speaks TLS"), ({"GENLOCK_CA": str(other / "ca.crt")}, "is not trusted")):
            refused = genlock("status", "--endpoint", endpoint, "--timeout", "5", **stranger)
            assert refused.returncode == UNREACHABLE, (stranger, refused.stderr)
            assert told in " ".join(refused.stderr.split())
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(own / "ca.crt"))
        with urllib.request.urlopen(f"{url}/models", context=context, timeout=20) as reply:
            assert reply.status == 200
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(f"{url.replace('https', 'http')}/models", timeout=20)


@pytest.mark.timeout(240)
def test_without_a_folder_they_are_kept_for_the_next_start(tmp_path: Path) -> None:
    kept = tmp_path / "genlock" / "tls"
    with up(XDG_STATE_HOME=str(tmp_path)) as (endpoint, _url):
        first = (kept / "ca.crt").read_bytes()
        assert genlock("status", "--endpoint", endpoint, GENLOCK_CA=str(kept / "ca.crt")).returncode == OK
        assert (kept / "tls.key").stat().st_mode & 0o077 == 0, "the key is its owner's"
    with up(XDG_STATE_HOME=str(tmp_path)) as (endpoint, _url):
        assert (kept / "ca.crt").read_bytes() == first, "clients that trust it need nothing new"
        assert genlock("status", "--endpoint", endpoint, GENLOCK_CA=str(kept / "ca.crt")).returncode == OK
