"""A registry that is flushed, killed and restarted under load: no request hears of it, and nothing stale gets valid."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from cluster.gateway.fleet import WorkerRecord, WorkerState
from cluster.registry.records import Desired
from cluster.roles import Role
from cluster.selftest.injector import Injector
from cluster.selftest.lab import Client, Subject, load_subject
from cluster.selftest.rows import _replace_pages
from genlock.v1 import inference_pb2, inference_pb2_grpc
from kvstore.checks import ALL_CHECKS
from kvstore.errors import StalePage
from tests.support.registry_lab import LIMIT_S, TOKENS, TTL_MS, RegistryLab, until
from wire.options import open_channel


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


async def test_a_flush_under_load_fails_no_request_and_workers_register_again(subject: Subject, tmp_path: Path) -> None:
    async with RegistryLab(subject, tmp_path) as lab:
        lives = lab.incarnations()
        lab.held = True
        before = await lab.ask_all().streaming()
        await lab.valkey.flush()
        meanwhile = lab.ask_all()
        await lab.until_registered()
        await meanwhile.streaming()
        lab.held = False
        await before.right()
        await meanwhile.right()
        await lab.ask_all().right()
        assert lab.incarnations() == lives == await lab.registered()
        assert lab.all_ready()
        await lab.until_status("ok")
        await lab.settled()


async def test_a_registry_killed_under_load_fails_no_request_and_is_filled_when_it_is_back(
    subject: Subject, tmp_path: Path
) -> None:
    async with RegistryLab(subject, tmp_path) as lab:
        lives = lab.incarnations()
        lab.held = True
        before = await lab.ask_all().streaming()
        lab.valkey.kill()
        await lab.until_status("unreachable for ")
        failures = {name: worker.heartbeat.state.failures for name, worker in lab.workers.items()}
        # Longer than any record lives: a heartbeat is every third of its time.
        await until(
            lambda: all(w.heartbeat.state.failures >= failures[name] + 4 for name, w in lab.workers.items()),
            "all records would have run out",
        )
        lab.held = False
        await before.right()
        status = await lab.status(0)
        assert "serving with the last view" in status.registry
        assert sorted(entry.worker_id for entry in status.workers) == sorted(lab.workers)
        assert {entry.state for entry in status.workers} == {"READY"}
        await lab.ask_all().right()
        lab.held = True
        meanwhile = await lab.ask_all().streaming()
        await lab.valkey.start()
        await lab.until_registered()
        await lab.until_status("ok")
        lab.held = False
        await meanwhile.right()
        await lab.ask_all().right()
        assert lab.incarnations() == lives == await lab.registered()
        assert all(worker.heartbeat.state.registered for worker in lab.workers.values())
        assert lab.all_ready()
        await lab.settled()


def known_of(lab: RegistryLab, worker_id: str) -> list[WorkerRecord]:
    """What each gateway knows of it; one that has dropped the old life may not have found the new one yet."""
    fleets = [front.gateway.state.fleet.workers for front in lab.fronts]
    return [fleet[worker_id] for fleet in fleets if worker_id in fleet]


async def test_a_worker_restarted_during_an_outage_is_a_new_life_and_its_old_pages_are_refused(
    subject: Subject, tmp_path: Path
) -> None:
    inject = Injector()
    tuning = {"decode-0": inject.decode_tuning(ALL_CHECKS, subject.model)}
    async with RegistryLab(subject, tmp_path, decode=1, tuning=tuning) as lab:
        inject.before_decode_plan = lab.may_decode
        client = lab.clients[0]
        victim, foreign = subject.prompt("victim"), subject.prompt("foreign")
        inject.victim = victim
        assert subject.right(victim, await client.ask(victim, TOKENS)), "the first life is healthy"
        before, [old_record] = (
            lab.incarnations(),
            [r for r in await lab.registry.workers() if r.worker_id == "prefill-0"],
        )
        old_pages = inject.recorded[victim]
        assert {page.page.incarnation for page in old_pages} == {before["prefill-0"]}

        lab.valkey.kill()
        await lab.until_status("unreachable for ")
        lab.held = True
        neighbours = await lab.ask_all(2).streaming()
        await lab.workers["prefill-0"].stop(0)
        await lab.start_worker(Role.PREFILL, "prefill-0")
        await until(
            lambda: all(r.state is WorkerState.UNREACHABLE for r in known_of(lab, "prefill-0")),
            "the gateways see the old life end",
        )
        lab.held = False
        await neighbours.right()
        assert subject.right(foreign, await client.ask(foreign, 8)), "the other prefill worker goes on"
        lab.held = True
        neighbours = await lab.ask_all(2).streaming()

        await lab.valkey.start()
        await lab.until_registered()
        endpoint = lab.workers["prefill-0"].endpoint
        assert endpoint != old_record.endpoint
        await until(
            lambda: (
                [r.endpoint for r in known_of(lab, "prefill-0")] == [endpoint] * len(lab.fronts) and lab.all_ready()
            ),
            "the new life is found",
        )
        after = lab.incarnations()
        assert after["prefill-0"] != before["prefill-0"]
        assert {name: life for name, life in after.items() if name != "prefill-0"} == {
            name: life for name, life in before.items() if name != "prefill-0"
        }
        # A last heartbeat of the old life, held up on its way, does not bring it back.
        await lab.registry.put_worker(old_record, TTL_MS)
        assert await lab.registered() == after

        lab.held = False
        await neighbours.right()
        # The same slots, now with other prompts in them; then the old descriptors under the new life's handoff.
        inject.victim = ()
        for name in ("filler", "another"):
            assert subject.right(subject.prompt(name), await client.ask(subject.prompt(name), 1))
        inject.victim = victim
        inject.on_event = _replace_pages(old_pages, handoff_id=b"own")
        neighbours = lab.ask_all(2)
        reply = await client.ask(victim, TOKENS)
        assert isinstance(reply.error, StalePage), reply.error
        assert reply.tokens == ()
        inject.on_event = None
        assert subject.right(victim, await client.ask(victim, TOKENS)), "it was the descriptors alone"
        await neighbours.right()
        await lab.settled()


async def test_a_cordoned_worker_ends_what_it_runs_and_gets_nothing_new(subject: Subject, tmp_path: Path) -> None:
    async def worker_of(channel_number: int, prompt: tuple[int, ...], tokens: int, first: asyncio.Event) -> str:
        stub = inference_pb2_grpc.InferenceServiceStub(lab.clients[channel_number].channel)
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            sampling_params=inference_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        answer, worker = [], ""
        async for message in stub.Generate(request, timeout=LIMIT_S):
            first.set()
            answer.extend(message.token_ids)
            worker = message.finished.decode_worker or worker
        assert tuple(answer) == subject.answer(prompt, tokens).tokens
        return worker

    def cordons(names: set[str]) -> bool:
        return all(front.gateway.state.fleet.cordoned == names for front in lab.fronts)

    async with RegistryLab(subject, tmp_path, prefill=1) as lab:
        first = asyncio.Event()
        lab.held = True
        running = asyncio.create_task(worker_of(0, subject.prompt("load 0"), TOKENS, first))
        await asyncio.wait_for(first.wait(), LIMIT_S)
        wanted = await lab.registry.replace_desired(Desired(1, 1, 2, frozenset({"decode-0"})), 0)
        await until(lambda: cordons({"decode-0"}), "both gateways know")
        # decode-0 would be the emptier one, once its request has ended.
        assert not running.done()
        lab.held = False
        assert await running == "decode-0"
        for number in (0, 1, 0, 1):
            assert await worker_of(number, subject.prompt("load 1"), 8, asyncio.Event()) == "decode-1"
        [entry] = [entry for entry in (await lab.status(1)).workers if entry.worker_id == "decode-0"]
        assert entry.state == "READY"
        assert "cordoned" in entry.detail
        await lab.valkey.flush()  # the wanted state is lost: that lifts no cordon
        await lab.until_registered()
        assert await worker_of(1, subject.prompt("load 1"), 8, asyncio.Event()) == "decode-1"
        assert cordons({"decode-0"})
        await lab.registry.replace_desired(replace(wanted, cordoned=frozenset()), 0)
        await until(lambda: cordons(set()), "the cordon is lifted")
        assert await worker_of(1, subject.prompt("load 1"), 8, asyncio.Event()) == "decode-0"
        await lab.settled()


async def test_a_worker_that_died_goes_and_one_that_only_fell_silent_stays(subject: Subject, tmp_path: Path) -> None:
    async with RegistryLab(subject, tmp_path, fronts=1) as lab:
        fleet = lambda: lab.fronts[0].gateway.state.fleet.workers  # noqa: E731
        silent = lab.workers["decode-0"].heartbeat
        await silent.stop()
        dead = lab.workers.pop("decode-1")
        await dead.stop(0)
        await until(lambda: "decode-1" not in fleet(), "the dead one is gone")
        assert "decode-0" not in await lab.registered()
        assert fleet()["decode-0"].state is WorkerState.READY
        await lab.ask_all(2).right()
        await lab.settled()


class GatewayProcess:
    """`genlock gateway` as an operator runs it."""

    def __init__(self, lab: RegistryLab) -> None:
        self._lab = lab

    async def __aenter__(self) -> GatewayProcess:
        url = self._lab.valkey.url
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cluster.cli.main", "gateway", "--registry", url, "--model", "probe",
            "--port", "0", "--http-port", "0", "--set", "registry.poll_ms=50",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        assert self.process.stdout is not None
        lines = [(await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)).decode().strip() for _ in range(2)]
        self.endpoint, self.url = lines
        self.client = Client(open_channel(self.endpoint))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.client.channel.close(None)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def test_two_gateway_processes_serve_the_same_workers_and_one_outlives_the_other(
    subject: Subject, tmp_path: Path
) -> None:
    async with (
        RegistryLab(subject, tmp_path, fronts=0, prefill=1, decode=1) as lab,
        GatewayProcess(lab) as one,
        GatewayProcess(lab) as two,
    ):
        prompt = subject.prompt("load 0")
        for gateway in (one, two):
            async with asyncio.timeout(LIMIT_S):
                while (await gateway.client.ask(prompt, 8)).error is not None:
                    await asyncio.sleep(0.1)  # it has not asked every worker yet
            assert subject.right(prompt, await gateway.client.ask(prompt, 8))
        lab.clients = [two.client]
        lab.held = True
        running = await lab.ask_all(2).streaming()
        one.process.kill()
        await one.process.wait()
        lab.held = False
        async with AsyncOpenAI(base_url=two.url, api_key="none") as openai:
            answer = await openai.completions.create(model="probe", prompt="[k] hello", max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
        await running.right()
        lab.clients = []
        two.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(two.process.wait(), LIMIT_S) == 0
        assert await lab.registered() == lab.incarnations(), "gateways come and go; workers stay"
        await lab.settled()
