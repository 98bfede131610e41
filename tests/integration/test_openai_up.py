"""`genlock up` serves both doors: its output, and its signals with an HTTP server in the same process."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


@contextmanager
def up(*args: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process and the two lines that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_cluster", "here", "http", *args],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert select.select([process.stdout], [], [], LIMIT_S)[0], "the cluster did not start"
        yield process, process.stdout.readline().strip(), process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_both_endpoints_are_printed_and_an_idle_cluster_stops_at_once():
    with up() as (process, endpoint, url):
        assert endpoint.startswith("127.0.0.1:")
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/v1")
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            assert client.completions.create(model="toy", prompt="hello", max_tokens=5).choices[0].text == "hello"
            process.send_signal(signal.SIGINT)
            _out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert "Traceback" not in err, err


@pytest.mark.timeout(60)
def test_a_second_signal_does_not_wait_for_a_stream():
    with up("hang") as (process, _endpoint, url):
        body = json.dumps({"model": "toy", "prompt": "hello", "stream": True}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
        ends: list[bytes | Exception] = []
        reply = urllib.request.urlopen(request, timeout=LIMIT_S)

        def read() -> None:
            try:
                ends.append(reply.read())
            except Exception as error:
                ends.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=LIMIT_S)
        reader.join(LIMIT_S)
        assert process.returncode == 0
        assert "Traceback" not in err, err
        # Whatever the reader got, it was no end.
        assert isinstance(ends[0], Exception) or b"[DONE]" not in ends[0]
