"""The same fault cases on Genlock. No reference ever reaches a client here, so each fault is made where the same thing
would have to happen: in the messages between the two workers, in the pools, or to the process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from bench.peers.cases import ANSWER_TOKENS, CASES, Case, Outcome, Verdict, judge, marked
from cluster.selftest.injector import Message
from cluster.selftest.kills import KillLab
from cluster.selftest.lab import PROMPT_TOKENS, Answer, Lab, Reply, Subject, load_subject
from cluster.selftest.rows import (
    Observed,
    consumed_again,
    lease_expired,
    out_of_pool,
    restarted,
    unknown_handoff,
)
from decode.core import StartHandoff
from kvstore.checks import ALL_CHECKS
from kvstore.errors import DeadlineExceeded

SYSTEM = "Genlock"
STOPPED_TIMEOUT_S = 30.0
FLAGS: dict[str, object] = {"cache.prefill_pages": 96, "cache.decode_pages": 128}


class MarkedSubject(Subject):
    """A model whose prompts hide a marker each; all have about the same length, whatever length is asked for."""

    def prompt(self, name: str, tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(marked(name).text, allow_special=True))  # type: ignore[call-arg] # ByteLevelTokenizer's

    def text(self, token_ids: Sequence[int]) -> str:
        stream = self.tokenizer.stream()
        return "".join(stream.push(t) for t in token_ids) + stream.finish()

    def right(self, prompt: Sequence[int], reply: Reply) -> bool:
        """Up to the end of sequence. What the model is made to say after that hangs on the last bit of its sums, which
        a process with other threads adds in another order."""
        wanted = self.answer(prompt, len(reply.tokens) or 1).tokens
        return reply.error is None and self._upto_end(reply.tokens) == self._upto_end(wanted)

    def _upto_end(self, tokens: Sequence[int]) -> Sequence[int]:
        ends = [at for at, token in enumerate(tokens) if token in self.model.info.eos_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    def right_text(self, name: str) -> str:
        wanted: Answer = self.answer(self.prompt(name), ANSWER_TOKENS)
        return self.text(wanted.tokens)


def marked_subject(name: str = "smollm2") -> MarkedSubject:
    """The default model: the same weights that the peers get."""
    base = load_subject(name)
    return MarkedSubject(base.name, base.model, base.tokenizer, ANSWER_TOKENS, neighbour_tokens=64)


def _changed(change: Callable[[list[Message], list[Message]], list[Message]]) -> Callable[[Lab], Awaitable[Observed]]:
    """`change` gets the victim's page messages and those of a foreign request that was computed before and whose pages
    are still live."""

    async def run(lab: Lab) -> Observed:
        lab.inject.victim = lab.victim_prompt
        foreign = lab.subject.prompt("foreign")
        await lab.ask(foreign, 1)

        def hook(start: StartHandoff, messages: list[Message]) -> list[Message]:
            pages = [m for m in messages if m.WhichOneof("event") == "page"]
            rest = [m for m in messages if m.WhichOneof("event") != "page"]
            return [*change(pages, lab.inject.recorded[foreign]), *rest] if pages else messages

        lab.inject.on_event = hook
        return Observed(await lab.ask_victim())

    return run


def _theirs(own: list[Message], foreign: list[Message]) -> list[Message]:
    """Another live request's pages under this handoff's own id."""
    out = [Message.FromString(page.SerializeToString()) for page in foreign[: len(own)]]
    for page in out:
        page.handoff_id = own[0].handoff_id
    return out


async def healthy(lab: Lab) -> Observed:
    lab.inject.victim = lab.victim_prompt
    return Observed(await lab.ask_victim())


async def expired(lab: Lab) -> Observed:
    """The lease ends while decode waits; nobody takes the pages."""
    lab.inject.victim = lab.victim_prompt

    async def outlive() -> None:
        lab.inject.clock_shift_ms += lab.config.transfer.lease_ms + 1
        while len(lab.prefill_engine.core.leases):
            await asyncio.sleep(0.01)

    fired: list[bool] = []

    def before_pull() -> None:
        if not fired:
            fired.append(True)
            lab.from_thread(outlive)

    lab.inject.before_pull = before_pull
    return Observed(await lab.ask_victim())


IN_PROCESS: dict[str, Callable[[Lab], Awaitable[Observed]]] = {
    "healthy": healthy,
    "unknown-id": unknown_handoff,
    "out-of-range": out_of_pool,
    "other-live": _changed(_theirs),
    "half-list": _changed(lambda own, foreign: own[: len(own) // 2]),
    "consumed-recycled": consumed_again,
    "expired-recycled": lease_expired,
    "expired": expired,
    "restarted": restarted,
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


async def _in_process(subject: MarkedSubject, name: str) -> tuple[Reply, bool]:
    lab = Lab(subject, flags=FLAGS)
    try:
        await lab.start()
        reply, served = await _with_neighbour(subject, lab.ask, lambda: IN_PROCESS[name](lab))
        return reply, served and await lab.settled()
    finally:
        await lab.stop()


async def _with_signal(subject: MarkedSubject, number: int) -> tuple[Reply, bool]:
    """To a prefill worker that is a process, in the middle of the victim's handoff."""
    lab = KillLab(subject, ALL_CHECKS)
    try:
        await lab.start()

        async def strike() -> Observed:
            before = await lab.status("prefill-0")
            victim = asyncio.create_task(lab.client.ask(subject.prompt("victim"), ANSWER_TOKENS))
            await lab.until("prefill-0", lambda s: s.pool.sealed - before.pool.sealed >= 4)
            pid = (await lab.status("prefill-0")).pid
            os.kill(pid, number)
            try:
                async with asyncio.timeout(STOPPED_TIMEOUT_S):
                    return Observed(await victim)
            except TimeoutError:
                error = DeadlineExceeded("no_answer", f"no answer in {STOPPED_TIMEOUT_S:.0f} s")
                return Observed(Reply((), error))
            finally:
                if number == signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)

        return await _with_neighbour(subject, lab.client.ask, strike)
    finally:
        await lab.stop()


async def _with_neighbour(
    subject: MarkedSubject, ask: Callable[..., Awaitable[Reply]], strike: Callable[[], Awaitable[Observed]]
) -> tuple[Reply, bool]:
    """What the victim heard, and whether a request that ran all the while on the same workers was right."""
    running = asyncio.Event()
    prompt = subject.prompt("neighbour")

    async def beside() -> Reply:
        return await ask(prompt, subject.neighbour_tokens, lambda count: running.set())

    neighbour = asyncio.create_task(beside())
    await running.wait()
    seen = await strike()
    return seen.reply, seen.others_ok and subject.right(prompt, await neighbour)


def run_case(subject: MarkedSubject, case: Case, repeat: int) -> Outcome:
    """One trial on a cluster of its own."""
    began = time.monotonic()
    trial = _with_signal(subject, SIGNALS[case.name]) if case.name in SIGNALS else _in_process(subject, case.name)
    reply, served = asyncio.run(trial)
    seconds = round(time.monotonic() - began, 2)
    text, right = subject.text(reply.tokens), subject.right_text("victim")
    if reply.error is None:
        others = [marked(name) for name in ("foreign", "neighbour", "filler", "other")]
        return Outcome(SYSTEM, case.name, repeat, "OK", judge(text, right, others), served, seconds, text[:80])
    told = f"{reply.error.status}/{reply.error.reason}"
    if reply.error.reason == "no_answer":
        return Outcome(SYSTEM, case.name, repeat, told, Verdict.NOTHING, served, seconds)
    wanted = subject.answer(subject.prompt("victim"), ANSWER_TOKENS)
    verdict = Verdict.REFUSED if wanted.begins_with(reply) else Verdict.WRONG
    return Outcome(SYSTEM, case.name, repeat, told, verdict, served, seconds, text[:80], reply.error.message[:120])


def run(subject: MarkedSubject, names: Sequence[str], repeats: int, on_outcome: Callable[[Outcome], None]) -> None:
    for case in CASES:
        if case.name in names:
            for repeat in range(1 if case.once else repeats):
                on_outcome(run_case(subject, case, repeat))
