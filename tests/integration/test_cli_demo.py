"""The demo tells the truth: equal answers are equal however they were chunked, and a difference is a failure."""

from __future__ import annotations

import itertools

import pytest

from cluster.cli.demo import demonstrate
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.spec import WorkerSpec
from cluster.launch.up import Cluster
from genlock.v1 import worker_pb2
from tests.support.fake_workers import BuiltFake, build_fake, config, finished, load_fake, tokens


async def run_demo(*answers: tuple[bytes, ...], failed_checks: int = 0) -> int:
    """Decode gives one of `answers`, each as chunks, to each request in turn."""
    turn = itertools.cycle(answers)

    async def script(_fake, _request):
        chunks = next(turn)
        for chunk in chunks:
            yield tokens(chunk)
        yield finished(sum(map(len, chunks)))

    def build(spec: WorkerSpec) -> BuiltFake:
        worker = build_fake(spec)
        worker.script = script
        plain = worker.Status

        async def status(request, context) -> worker_pb2.WorkerStatus:
            answer = await plain(request, context)
            answer.verification["receipt_digest/ok"] = 3
            answer.verification["receipt_digest/digest_mismatch"] = failed_checks
            return answer

        worker.Status = status
        return worker

    settings = config()
    launcher = InProcessLauncher(build)
    code = await demonstrate(
        settings, lambda report: Cluster(settings, launcher, load_fake, report=report), "hello", 3, "with stand-ins"
    )
    assert launcher.workers == {}
    return code


async def test_equal_answers_in_other_chunks_are_equal(capsys):
    assert await run_demo((b"ab", b"c"), (b"a", b"b", b"c")) == 0
    out, err = capsys.readouterr()
    assert "> hello\nabc\n" in out
    assert "Same tokens both times: yes" in out
    for phase in "12345":
        assert f"{phase}. " in err
    assert "with stand-ins" in err


@pytest.mark.parametrize(("answers", "failed"), [(((b"abc",), (b"abd",)), 0), (((b"abc",), (b"abc",)), 1)])
async def test_a_difference_or_a_failed_check_is_a_failure(capsys, answers, failed: int):
    assert await run_demo(*answers, failed_checks=failed) == 1
    assert "NOT as expected" in capsys.readouterr().out
