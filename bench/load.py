"""The load of `genlock bench serve` and what is made of its samples. Pure: seeds, times and samples in, figures out.

Open loop: requests arrive by a Poisson process whether or not earlier ones were answered, and latency counts from the
arrival, so that a system which falls behind cannot hide the wait ("coordinated omission").
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidInput

MAX_REQUESTS = 20_000
MAX_LENGTH_TOKENS = 1 << 20
PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Lengths drawn evenly from low..high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, field: str) -> Spread:
        """`64:512`, or `32` for always 32. Raises InvalidInput."""
        found = re.fullmatch(r"([0-9]{1,7})(?::([0-9]{1,7}))?", text.strip())
        low = int(found[1]) if found else 0
        high = int(found[2] or found[1]) if found else 0
        if not 1 <= low <= high <= MAX_LENGTH_TOKENS:
            raise InvalidInput("bad_spread", f"{field} {text!r} must read LOW:HIGH or N, at least 1", field=field)
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Shape:
    """What the requests look like. `shared_prefix`: the part of each prompt that all prompts have in common."""

    requests: int
    rate_per_s: float
    prompt_tokens: Spread
    answer_tokens: Spread
    shared_prefix: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field, ok, must in (
            ("requests", 1 <= self.requests <= MAX_REQUESTS, f"must be 1 to {MAX_REQUESTS}"),
            ("rate", 0 < self.rate_per_s < float("inf"), "must be above 0 requests a second"),
            ("shared_prefix", 0 <= self.shared_prefix <= 1, "must be between 0 and 1"),
        ):
            if not ok:
                raise InvalidInput("bad_load", f"{field} {must}", field=field)


@dataclass(frozen=True)
class Ask:
    """One request of the load; it arrives `at_s` after the start."""

    number: int
    at_s: float
    token_ids: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True)
class ServerTimes:
    """What the server says of one request, milliseconds; see Timings in inference.proto."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    first_token_ms: float
    total_ms: float
    cached_tokens: int = 0

    @property
    def rest_ms(self) -> float:
        """The part of the time to the first token that no other part covers: gateway, network, hand-overs. Below 0
        when a preempted request was prefilled a second time after its first token."""
        return self.first_token_ms - self.queue_ms - self.prefill_ms - self.transfer_ms

    @property
    def decode_ms(self) -> float:
        return self.total_ms - self.first_token_ms


@dataclass(frozen=True)
class Sample:
    """One request as the client saw it; seconds since the start of the run. Not `sent`: the run ended before."""

    ask: Ask
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float = 0.0
    tokens: int = 0
    gaps_s: tuple[float, ...] = ()  # between messages that brought tokens
    error: str = ""
    server: ServerTimes | None = None

    @property
    def ok(self) -> bool:
        return self.sent_s is not None and not self.error


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServeRow:
    """One system under the load. Latencies are milliseconds over the requests that were answered, from their arrival
    on; None where there is nothing to take them from."""

    system: str
    requests: int
    sent: int
    ok: int
    errors: dict[str, int]  # by reason; ok and errors add up to sent
    rate: float  # asked for, requests a second
    rate_sent: float
    seconds: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens: int
    ttft_ms: Percentiles | None
    per_token_ms: Percentiles | None
    gap_ms: Percentiles | None
    total_ms: Percentiles | None
    late_ms: Percentiles | None  # from arrival until sent: the client's own share
    queue_ms: Percentiles | None
    prefill_ms: Percentiles | None
    transfer_ms: Percentiles | None
    rest_ms: Percentiles | None
    decode_ms: Percentiles | None
    server_ttft_ratio: float | None  # median of the server's first_token_ms over the client's stop-watch
    note: str = ""


def arrivals_s(count: int, rate_per_s: float, seed: int) -> tuple[float, ...]:
    """Arrival times of a Poisson process: independent exponential gaps of mean 1 / rate. The first comes at 0."""
    rng = random.Random(f"{seed} arrivals")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate_per_s))
    return tuple(times[:count])


def make_asks(shape: Shape, vocab_size: int) -> tuple[Ask, ...]:
    """All requests of a load. Ids come from the middle of the vocabulary: control tokens stand at its ends."""
    low, high = vocab_size // 8, max(vocab_size // 8 + 1, vocab_size - vocab_size // 8)
    rng = random.Random(f"{shape.seed} prompts")
    common = tuple(rng.randrange(low, high) for _ in range(shape.prompt_tokens.high))
    asks: list[Ask] = []
    for number, at_s in enumerate(arrivals_s(shape.requests, shape.rate_per_s, shape.seed)):
        length, answer = shape.prompt_tokens.draw(rng), shape.answer_tokens.draw(rng)
        shared = int(length * shape.shared_prefix)
        own = tuple(rng.randrange(low, high) for _ in range(length - shared))
        asks.append(Ask(number, at_s, common[:shared] + own, answer))
    return tuple(asks)


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """p50, p90 and p99 by linear interpolation between the neighbouring order statistics; None of nothing."""
    if not values:
        return None
    return Percentiles(*(round(float(v), 3) for v in np.percentile(values, PERCENTS)))


def add_up(system: str, shape: Shape, samples: Sequence[Sample], note: str = "") -> ServeRow:
    """The figures of one run. Every request that was sent is counted once: as ok or under its error's reason."""
    sent = [(s, s.sent_s) for s in samples if s.sent_s is not None]
    good = [s for s, _ in sent if s.ok]
    timed = [(s, s.first_s, s.last_s) for s in good if s.first_s is not None and s.last_s is not None]
    server = [s.server for s in good if s.server is not None]
    begin_s = min((s.ask.at_s for s, _ in sent), default=0.0)
    seconds = max((s.ended_s for s, _ in sent), default=0.0) - begin_s
    sent_span_s = max((at_s for _, at_s in sent), default=0.0) - begin_s

    def per_second(count: int, span_s: float) -> float:
        return round(count / span_s, 3) if span_s > 0 else 0.0

    def ms(values: Sequence[float]) -> Percentiles | None:
        return percentiles([1000 * value for value in values])

    return ServeRow(
        system=system,
        requests=shape.requests,
        sent=len(sent),
        ok=len(good),
        errors=dict(sorted(Counter(s.error for s, _ in sent if s.error).items())),
        rate=shape.rate_per_s,
        rate_sent=per_second(len(sent) - 1, sent_span_s),
        seconds=round(seconds, 3),
        tokens_per_s=per_second(sum(s.tokens for s in good), seconds),
        prompt_tokens_per_s=per_second(sum(len(s.ask.token_ids) for s in good), seconds),
        cached_tokens=sum(times.cached_tokens for times in server),
        ttft_ms=ms([first_s - s.ask.at_s for s, first_s, _ in timed]),
        per_token_ms=ms([(last_s - first_s) / (s.tokens - 1) for s, first_s, last_s in timed if s.tokens > 1]),
        gap_ms=ms([gap_s for s in good for gap_s in s.gaps_s]),
        total_ms=ms([s.ended_s - s.ask.at_s for s in good]),
        late_ms=ms([at_s - s.ask.at_s for s, at_s in sent]),
        queue_ms=percentiles([times.queue_ms for times in server]),
        prefill_ms=percentiles([times.prefill_ms for times in server]),
        transfer_ms=percentiles([times.transfer_ms for times in server]),
        rest_ms=percentiles([times.rest_ms for times in server]),
        decode_ms=percentiles([times.decode_ms for times in server]),
        server_ttft_ratio=ttft_ratio(good),
        note=note,
    )


def ttft_ratio(samples: Sequence[Sample]) -> float | None:
    """Median of server's over client's time to the first token, both from the sending on. A little below 1 is right:
    the client also sees the network and its own event loop."""
    ratios = [
        s.server.first_token_ms / (1000 * (s.first_s - s.sent_s))
        for s in samples
        if s.server is not None and s.first_s is not None and s.sent_s is not None and s.first_s > s.sent_s
    ]
    return round(float(np.median(ratios)), 4) if ratios else None
