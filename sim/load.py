"""What a seed asks for: the shape of the cluster and the requests, drawn before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from decode.core import DecodeLimits
from model.sampling import SamplingParams
from model.ticket import Ticket
from prefill.core import PrefillLimits
from sim.compute import PAGE_TOKENS, VOCABULARY, Oracle

CONTEXT_TOKENS = 96
# Seeds from here on play large worlds: long prompts and answers, pools of hundreds of pages.
LARGE_FROM = 1_000_000
LARGE_CONTEXT_TOKENS = 640
PROBE_TOKENS = 9
TENANTS = ("ant", "bee")


@dataclass(frozen=True)
class Shape:
    """Sizes of a simulated cluster. `layout` is a place in `small_layouts()`."""

    layout: int
    prefills: int
    decodes: int
    prefill_slots: int
    decode_slots: int
    scrub: bool
    prefill_limits: PrefillLimits
    decode_limits: DecodeLimits
    max_copy_delay_ms: int
    gateways: int
    fixed_endpoints: bool  # whether a restarted worker comes back under its former endpoint


@dataclass(frozen=True)
class Wish:
    """One request before it is sent. `number` is its name in a run; it asks `gateway` for so many `answers`.

    `label` is its caller's own, `shared_label` what a careless caller writes instead: an earlier request's, or none.
    """

    number: int
    at_ms: int
    gateway: int
    answers: int
    ticket: Ticket
    deadline_ms: int
    cancel_after_ms: int
    label: str
    shared_label: str


def draw_shape(seed: int) -> Shape:
    rng = random.Random(f"{seed}/shape")
    large = seed >= LARGE_FROM
    context_tokens = LARGE_CONTEXT_TOKENS if large else CONTEXT_TOKENS
    slots = range(200, 501) if large else range(16, 57)
    return Shape(
        layout=rng.randrange(3),
        prefills=rng.choice((1, 2, 2)),
        decodes=rng.choice((1, 1, 2)),
        prefill_slots=rng.choice(slots),
        decode_slots=rng.choice(slots),
        scrub=rng.random() < 0.5,
        prefill_limits=PrefillLimits(
            chunk_tokens=rng.choice((32, 64, 128, 256) if large else (3, 8, 16, 32)),
            max_running=rng.choice((1, 2, 4)),
            max_leases=rng.choice((4, 32)),
            lease_ms=rng.choice((40, 120, 400)),
            context_tokens=context_tokens,
        ),
        decode_limits=DecodeLimits(
            max_running=rng.choice((2, 4, 8)),
            max_preemptions=rng.choice((0, 2, 4)),
            context_tokens=context_tokens,
            assign_ms=150,
            hold_ms=20,
        ),
        max_copy_delay_ms=rng.choice((5, 40, 120)),
        gateways=rng.choice((1, 2, 3)),
        fixed_endpoints=rng.random() < 0.5,
    )


def draw_wishes(seed: int, shape: Shape) -> list[Wish]:
    """Prompts share stems, so that pages are shared; some are repeated as a whole."""
    rng = random.Random(f"{seed}/wishes")
    scale = 8 if seed >= LARGE_FROM else 1
    stems = [_tokens(rng, PAGE_TOKENS * rng.randrange(2 * scale, 10 * scale + 1)) for _ in range(2)]
    wishes: list[Wish] = []
    at_ms = 0
    for number in range(rng.randrange(4, 21)):
        at_ms += rng.choice((0, 0, 1, 5, 30))
        prompt = rng.choice(stems)[: rng.randrange(40 * scale + 1)] + _tokens(rng, rng.randrange(1, 15 * scale + 1))
        if wishes and rng.random() < 0.15:
            prompt = rng.choice(wishes).ticket.token_ids
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, 6, 12, 30 * min(scale, 3))), ignore_eos=rng.random() < 0.3
        )
        sampling = _with_ends(seed, number, prompt, sampling)
        ticket = Ticket(rng.randbytes(16), rng.choice(TENANTS), prompt, sampling, "sim", "sim")
        gateway, answers = rng.randrange(shape.gateways), rng.choice((1, 1, 1, 1, 1, 2))
        labels = f"label-{number}", _shared_label(seed, number)
        wishes.append(Wish(number, at_ms, gateway, answers, ticket, 5000, rng.randrange(120), *labels))
    return wishes


def _shared_label(seed: int, number: int) -> str:
    rng = random.Random(f"{seed}/labels/{number}")
    return rng.choice(("", "label-0", f"label-{rng.randrange(max(1, number))}"))


def _with_ends(seed: int, number: int, prompt: tuple[int, ...], sampling: SamplingParams) -> SamplingParams:
    """Some requests stop at a token that their answer has, some not before so many tokens."""
    rng = random.Random(f"{seed}/ends/{number}")
    if rng.random() < 0.2:
        token = Oracle(prompt).answer(rng.randrange(sampling.max_tokens))
        sampling = replace(sampling, stop_token_ids=(token,))
    if rng.random() < 0.15:
        sampling = replace(sampling, min_tokens=rng.randrange(sampling.max_tokens + 1))
    return sampling


def draw_probe(seed: int, gateway: int) -> Wish:
    """What each gateway is asked when everything has calmed down; nobody has asked it before."""
    rng = random.Random(f"{seed}/probe/{gateway}")
    sampling = SamplingParams(max_tokens=3)
    ticket = Ticket(rng.randbytes(16), TENANTS[0], _tokens(rng, PROBE_TOKENS), sampling, "sim", "sim")
    return Wish(-1, 0, gateway, 1, ticket, 5000, 0, f"probe-{gateway}", "")


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))
