"""`genlock bench drift`: how far answers over a quantized cache are from answers over an unquantized one.

The unquantized side is one process without split, transfer or cache (sim/oracle.py) whose pages hold the model's own
elements. Its answer is followed as long as the split cluster gives the same tokens, so that each position compares
what both models say after the same text: the log-probability of the unquantized token. The first position at which
they part is compared as well, and the last one of its prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import grpc.aio
import numpy as np

from cluster.selftest.lab import PAGE_TOKENS, Lab, Subject, load_subject
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc
from kvstore.errors import GenlockError
from kvstore.layout import WORKING_FORMATS, KvFormat
from model.sampler import SampledToken
from model.sampling import SamplingParams
from sim.oracle import Oracle
from wire.errors import from_rpc

PROMPTS = 64
PROMPT_TOKENS = 64
ANSWER_TOKENS = 8
TOP = 20  # as many as the API tells; a token that is not among them counts with the last one's
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Drift:
    """Over all compared positions. Gaps are absolute differences of natural log-probabilities."""

    model: str
    kv_format: str
    prompts: int
    positions: int
    mean_gap: float
    p99_gap: float
    max_gap: float
    same_token: float  # share of positions at which both choose the same token
    equals_one_process: bool  # the split answer is exactly the one that one process gives over the same format


@dataclass(frozen=True)
class Said:
    """One position of an answer."""

    token_id: int
    logprob: float
    top: dict[int, float]

    def of(self, token_id: int) -> float:
        """The log-probability of any token; at most the least that was told."""
        if token_id == self.token_id:
            return self.logprob
        return self.top.get(token_id, min(self.top.values()))


async def measure(
    subject: Subject, kv_format: KvFormat, prompts: Sequence[Sequence[int]], served: Subject | None = None
) -> Drift:
    """Each prompt once on a cluster with this format, one after another, against one process with it and one without.

    `served` is what the cluster computes with, where that is to differ. Raises GenlockError where a prompt is not
    answered."""
    plain, same = (
        Oracle(subject.model, page_tokens=PAGE_TOKENS, kv_format=format_, slots=64)
        for format_ in (KvFormat.NONE, kv_format)
    )
    lab = Lab(served or subject, flags={"cache.kv_format": kv_format.value})
    gaps: list[float] = []
    chosen: list[bool] = []
    exact = True
    try:
        await lab.start()
        for prompt in prompts:
            split = await _ask(lab, prompt)
            exact = exact and split == await asyncio.to_thread(_alone, same, prompt)
            for theirs, ours in zip(await asyncio.to_thread(_alone, plain, prompt), split, strict=True):
                gaps.append(abs(theirs.logprob - ours.of(theirs.token_id)))
                chosen.append(theirs.token_id == ours.token_id)
                if not chosen[-1]:
                    break  # from here on the texts differ
    finally:
        await lab.stop()
    mean, p99, most = float(np.mean(gaps)), float(np.quantile(gaps, 0.99)), max(gaps)
    share = sum(chosen) / len(chosen)
    return Drift(subject.name, kv_format.value, len(prompts), len(gaps), mean, p99, most, share, exact)


def prompts_of(subject: Subject, count: int = PROMPTS) -> list[tuple[int, ...]]:
    """Of different lengths, so that answers begin everywhere in a page."""
    return [subject.prompt(f"drift {i}", PROMPT_TOKENS + i % PAGE_TOKENS) for i in range(count)]


def _alone(oracle: Oracle, prompt: Sequence[int]) -> list[Said]:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=TOP)
    return [_said(token) for token in oracle.answer(prompt, params)]


def _said(token: SampledToken) -> Said:
    """As it would come over the wire, where log-probabilities are single precision."""
    single = np.float32
    return Said(token.token_id, float(single(token.logprob or 0.0)), {t: float(single(lp)) for t, lp in token.top})


async def _ask(lab: Lab, prompt: Sequence[int]) -> list[Said]:
    params = pb.SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=TOP)
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=prompt), sampling_params=params)
    stub = inference_pb2_grpc.InferenceServiceStub(lab.client.channel)
    said: list[Said] = []
    try:
        async for message in stub.Generate(request, timeout=TIMEOUT_S):
            said += [
                Said(entry.token_id, entry.logprob, {top.token_id: top.logprob for top in entry.top})
                for entry in message.logprobs
            ]
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    if len(said) != ANSWER_TOKENS:
        raise GenlockError("answer_cut", f"{len(said)} of {ANSWER_TOKENS} tokens came")
    return said


@click.command(
    epilog="""\b
Examples:
  genlock bench drift
  genlock bench drift --model probe --format int8 --json"""
)
@click.option("--model", "model_name", default="smollm2", show_default=True)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(sorted(f.value for f in WORKING_FORMATS)),
    help="Default: all.",
)
@click.option("--prompts", type=click.IntRange(1, 4096), default=PROMPTS, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model_name: str, formats: tuple[str, ...], prompts: int, as_json: bool) -> int:
    """Distance of log-probabilities between a split cluster with a quantized cache and one process without."""
    logging.getLogger("genlock").setLevel(logging.WARNING)
    subject = load_subject(model_name)
    rows = [
        asyncio.run(measure(subject, KvFormat(name), prompts_of(subject, prompts)))
        for name in formats or sorted(WORKING_FORMATS)
    ]
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    click.echo("model    format  prompts  positions  mean gap   p99 gap   max gap  same token  equals one process")
    for row in rows:
        click.echo(
            f"{row.model:8s} {row.kv_format:6s} {row.prompts:8d} {row.positions:10d} {row.mean_gap:9.5f} "
            f"{row.p99_gap:9.5f} {row.max_gap:9.5f} {row.same_token:10.1%}  {row.equals_one_process}"
        )
    return 0


if __name__ == "__main__":
    command()
