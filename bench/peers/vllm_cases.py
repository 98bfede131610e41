"""The fault cases on vLLM: references that prefill gave are altered or kept, as anybody who reaches decode could."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.peers.cases import ANSWER_TOKENS, CASES, Case, Marked, Outcome, Verdict, judge, marked
from bench.peers.vllm_pair import LEASE_S, PREFILL_BLOCKS, Pair, Params, block_ids, with_blocks
from kvstore.errors import GenlockError

SYSTEM = "vLLM P/D"
STOPPED_TIMEOUT_S = 30.0
RECYCLED_SHARE = 0.9
MAX_RECYCLING = 14


@dataclass
class Bench:
    """One running pair, and the prompts that were given to it."""

    pair: Pair
    encode: Callable[[str], list[int]]
    count: int = 0
    others: list[Marked] = field(default_factory=list)

    def new(self) -> tuple[Marked, list[int]]:
        self.count += 1
        prompt = marked(f"vllm {self.count}")
        return prompt, self.encode(prompt.text)

    def other(self) -> list[int]:
        """A prompt of somebody else, remembered."""
        prompt, tokens = self.new()
        self.others.append(prompt)
        return tokens

    def right(self, tokens: list[int]) -> str:
        """What this system answers without splitting."""
        return self.pair.prefill.complete(tokens, ANSWER_TOKENS).text or ""

    def recycle(self, blocks: Iterable[int]) -> None:
        """Healthy requests of others until nearly all of these blocks hold something else."""
        wanted, taken = set(blocks), set[int]()
        for _ in range(MAX_RECYCLING):
            tokens = self.other()
            params = self.pair.hand_over(tokens)
            taken |= wanted & {b for group in block_ids(params) for b in group}
            self.pair.decode.complete(tokens, 2, params)
            if len(taken) >= RECYCLED_SHARE * len(wanted):
                return

    def outlive_lease(self) -> None:
        time.sleep(3 * LEASE_S)


Trial = Callable[[Bench, list[int], Params], Params]


def healthy(bench: Bench, tokens: list[int], params: Params) -> Params:
    return params


def unknown_id(bench: Bench, tokens: list[int], params: Params) -> Params:
    return {**params, "remote_request_id": f"cmpl-{uuid.uuid4().hex}"}


def out_of_range(bench: Bench, tokens: list[int], params: Params) -> Params:
    return with_blocks(params, [[b + PREFILL_BLOCKS for b in group] for group in block_ids(params)])


def other_live(bench: Bench, tokens: list[int], params: Params) -> Params:
    return with_blocks(params, block_ids(bench.pair.hand_over(bench.other())))


def half_list(bench: Bench, tokens: list[int], params: Params) -> Params:
    return with_blocks(params, [group[: len(group) // 2] for group in block_ids(params)])


def consumed_recycled(bench: Bench, tokens: list[int], params: Params) -> Params:
    bench.pair.decode.complete(tokens, ANSWER_TOKENS, params)
    bench.recycle(b for group in block_ids(params) for b in group)
    return params


def expired(bench: Bench, tokens: list[int], params: Params) -> Params:
    bench.outlive_lease()
    return params


def expired_recycled(bench: Bench, tokens: list[int], params: Params) -> Params:
    bench.outlive_lease()
    bench.recycle(b for group in block_ids(params) for b in group)
    return params


def restarted(bench: Bench, tokens: list[int], params: Params) -> Params:
    prefill = bench.pair.prefill
    prefill.stop(signal.SIGKILL)
    prefill.start()
    prefill.wait_ready()
    for _ in range(3):
        prefill.complete(bench.other(), 2)
    return params


def _connect(bench: Bench) -> None:
    """A pull that goes well: decode knows this life of prefill. Else a case would show a failing first handshake."""
    other = bench.other()
    bench.pair.decode.complete(other, 2, bench.pair.hand_over(other), 100.0)


def killed(bench: Bench, tokens: list[int], params: Params) -> Params:
    _connect(bench)
    bench.pair.prefill.stop(signal.SIGKILL)
    return params


def stopped(bench: Bench, tokens: list[int], params: Params) -> Params:
    _connect(bench)
    bench.pair.prefill.send(signal.SIGSTOP)
    return params


TRIALS: dict[str, Trial] = {
    "healthy": healthy,
    "unknown-id": unknown_id,
    "out-of-range": out_of_range,
    "other-live": other_live,
    "half-list": half_list,
    "consumed-recycled": consumed_recycled,
    "expired-recycled": expired_recycled,
    "expired": expired,
    "restarted": restarted,
    "killed": killed,
    "stopped": stopped,
}


def run_case(bench: Bench, case: Case, repeat: int) -> Outcome:
    """One trial, and the next request of somebody else after it. Servers that died are started again."""
    bench.others.clear()
    timeout_s = STOPPED_TIMEOUT_S if case.name == "stopped" else 100.0
    _, tokens = bench.new()
    try:
        right = bench.right(tokens)
        altered = TRIALS[case.name](bench, tokens, bench.pair.hand_over(tokens))
    except GenlockError as error:
        bench.pair.heal()
        return Outcome(SYSTEM, case.name, repeat, "not run", Verdict.NOTHING, False, 0.0, note=error.message)
    began = time.monotonic()
    reply = bench.pair.decode.complete(tokens, ANSWER_TOKENS, altered, timeout_s)
    seconds = round(time.monotonic() - began, 2)
    bench.pair.prefill.send(signal.SIGCONT)
    decode_lives = bench.pair.decode.healthy()
    text = reply.text
    if reply.status == 200 and text is not None:
        verdict, told = judge(text, right, bench.others), "HTTP 200"
    elif reply.status == 0 and decode_lives:
        verdict, told = Verdict.NOTHING, f"nothing in {timeout_s:.0f} s"
    else:
        verdict = Verdict.REFUSED if decode_lives else Verdict.DEAD
        told = f"HTTP {reply.status}" if reply.status else "connection broken"
    served = _serves(bench)
    bench.pair.heal()
    return Outcome(SYSTEM, case.name, repeat, told, verdict, served, seconds, (text or "")[:80])


def _serves(bench: Bench) -> bool:
    """Whether decode answers a plain request that needs no prefill server."""
    if not bench.pair.decode.healthy():
        return False
    return bench.pair.decode.complete(bench.new()[1], 2).status == 200


def run(bench: Bench, names: Sequence[str], repeats: int, on_outcome: Callable[[Outcome], None]) -> None:
    """All cases on a running pair."""
    for case in CASES:
        if case.name in names:
            for repeat in range(1 if case.once else repeats):
                on_outcome(run_case(bench, case, repeat))
