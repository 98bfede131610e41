"""A gateway's process is killed under a request, in each phase: the client hears so at once, what workers did for it is
given back, and a request through another gateway is right."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.launch.build import WorkerTuning
from cluster.selftest.lab import PAGE_TOKENS, REQUEST_TIMEOUT_S, Client, Subject, load_subject
from decode.engine import DecodeEngine
from kvstore.errors import Unavailable
from prefill.engine import PrefillHooks
from tests.support.registry_lab import RegistryLab, until
from wire.options import open_channel

ROOT = Path(__file__).parents[2]
START_S = 100.0
ANSWER_TOKENS = 1500  # there when the kill comes


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@asynccontextmanager
async def gateway_process(lab: RegistryLab) -> AsyncIterator[tuple[Client, int]]:
    """A gateway of its own that has found the workers: a client of it, and its process id."""
    settings = [f"cache.page_tokens={PAGE_TOKENS}", "workers.status_poll_ms=100", "registry.poll_ms=50"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cluster.cli.main", "gateway", "--registry", lab.valkey.url, "--model", "probe",
        "--port", "0", "--http-port", "-1", *(word for one in settings for word in ("--set", one)),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={key: value for key, value in os.environ.items() if not key.startswith("GENLOCK_")},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            client = Client(open_channel((await process.stdout.readline()).decode().strip()))
            while (await client.ask(lab.subject.prompt("first"), 2)).error is not None:
                await asyncio.sleep(0.05)
        yield client, process.pid
        await client.channel.close(None)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("phase", ["waiting for prefill", "answering"])
async def test_a_killed_gateway_leaves_nothing_behind(subject, tmp_path, phase):
    may_prefill = [True]
    tuning = WorkerTuning(model=subject.model, prefill=PrefillHooks(before_plan=lambda: may_prefill[0]))
    async with (
        RegistryLab(subject, tmp_path, fronts=1, prefill=1, decode=1, tuning={"prefill-0": tuning}) as lab,
        gateway_process(lab) as (client, pid),
    ):
        decode, prefill = lab.workers["decode-0"].engine, lab.workers["prefill-0"].engine
        assert isinstance(decode, DecodeEngine)
        beside = lab.ask_all(1, 200) if phase == "answering" else None
        if beside is not None:
            await beside.streaming()
        may_prefill[0] = phase != "waiting for prefill"
        answering = asyncio.Event()
        prompt = subject.prompt("victim")
        victim = asyncio.create_task(client.ask(prompt, ANSWER_TOKENS, lambda _count: answering.set()))
        if phase == "answering":
            await answering.wait()
        else:
            await until(lambda: prefill.facts().waiting == 1, "it waits for prefill")
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(REQUEST_TIMEOUT_S + 1):
            reply = await victim
        assert isinstance(reply.error, Unavailable)
        wanted = subject.answer(prompt, len(reply.tokens) or 1).tokens
        assert reply.tokens == wanted[: len(reply.tokens)]
        await until(
            lambda: all(item.ticket.token_ids != prompt for item in list(decode._live.values())), "decode ended it"
        )
        may_prefill[0] = True
        if beside is not None:
            await beside.right()
        await lab.settled()
        assert decode.facts().outcomes["cancelled"] == 1
        await lab.ask_all(2).right()
