"""Requests over time: read from a file, or drawn from a seed. Pure.

A trace file has one JSON object a line, `{"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}`, or is CSV with
these three columns. `{"outage_s": [600, 900]}` lines say when metrics are missing.
"""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvstore.errors import InvalidInput
from kvstore.json_text import parse_json

MAX_REQUESTS = 2_000_000
MAX_SECONDS = 7 * 86_400.0
MAX_TOKENS = 10_000_000


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    name: str
    arrivals: tuple[Arrival, ...]
    # Spans [from, to) without metrics.
    outages: tuple[tuple[float, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at_s if self.arrivals else 0.0


def parse(text: str, name: str) -> Trace:
    """Raises InvalidInput (`bad_trace`) naming the line and the fix."""
    rows = _csv_rows(text, name) if not text.lstrip().startswith("{") else _json_rows(text, name)
    arrivals: list[Arrival] = []
    outages: list[tuple[float, float]] = []
    for number, row in rows:
        if "outage_s" in row:
            outages.append(_outage(row["outage_s"], name, number))
            continue
        arrivals.append(_arrival(row, name, number))
        if len(arrivals) > MAX_REQUESTS:
            raise _bad(name, number, f"has more than {MAX_REQUESTS} requests")
    if not arrivals:
        raise _bad(name, 1, "has no request")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Trace(name, tuple(arrivals), tuple(sorted(outages)))


def _bad(name: str, number: int, wrong: str) -> InvalidInput:
    return InvalidInput(
        "bad_trace",
        f"{name} line {number} {wrong}; expected at_s, prompt_tokens and output_tokens, as in "
        '{"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}',
        field="trace",
    )


def _json_rows(text: str, name: str) -> list[tuple[int, Mapping[str, object]]]:
    rows: list[tuple[int, Mapping[str, object]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise _bad(name, number, f"is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise _bad(name, number, "is no object")
        rows.append((number, row))
    return rows


def _csv_rows(text: str, name: str) -> list[tuple[int, Mapping[str, object]]]:
    reader = csv.DictReader(io.StringIO(text))
    if not {"at_s", "prompt_tokens", "output_tokens"} <= set(reader.fieldnames or ()):
        raise _bad(name, 1, f"names the columns {', '.join(reader.fieldnames or ()) or 'none'}")
    return [(number, row) for number, row in enumerate(reader, 2)]


def _number(row: Mapping[str, object], key: str, name: str, line: int, low: float, high: float) -> float:
    raw = row.get(key)
    try:
        value = float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise _bad(name, line, f"has {key} = {str(raw)[:40]!r}, a number from {low:g} to {high:g} is needed")
    return value


def _arrival(row: Mapping[str, object], name: str, line: int) -> Arrival:
    return Arrival(
        _number(row, "at_s", name, line, 0, MAX_SECONDS),
        int(_number(row, "prompt_tokens", name, line, 1, MAX_TOKENS)),
        int(_number(row, "output_tokens", name, line, 1, MAX_TOKENS)),
    )


def _outage(raw: object, name: str, line: int) -> tuple[float, float]:
    if isinstance(raw, list) and len(raw) == 2 and all(isinstance(end, int | float) for end in raw) and raw[0] < raw[1]:
        return float(raw[0]), float(raw[1])
    raise _bad(name, line, "has an outage_s that is no [from, to]")


# --- drawn ones -------------------------------------------------------------------------------------------------------

# Second of the trace -> requests a second, mean prompt tokens, mean output tokens.
Shape = Callable[[float], tuple[float, float, float]]
HOUR_S = 3600.0


def _bursty(at_s: float) -> tuple[float, float, float]:
    burst = at_s % 900 >= 600
    return (9.0 if burst else 2.0), 900, 150


def _diurnal(at_s: float) -> tuple[float, float, float]:
    # A day in two hours.
    return 12.0 - 10.0 * math.cos(2 * math.pi * at_s / (2 * HOUR_S)), 900, 150


def _storm(at_s: float) -> tuple[float, float, float]:
    storm = 1800 <= at_s < 2700
    return 3.0, (6000 if storm else 900), 150


def _flapping(at_s: float) -> tuple[float, float, float]:
    return (7.0 if at_s % 60 < 30 else 1.0), 900, 150


_SHAPES: Mapping[str, tuple[float, Shape, tuple[tuple[float, float], ...]]] = MappingProxyType({
    "bursty": (HOUR_S, _bursty, ()),
    "diurnal": (2 * HOUR_S, _diurnal, ()),
    "long-prompt-storm": (1.25 * HOUR_S, _storm, ()),
    "metric-outage": (HOUR_S, _bursty, ((1150.0, 1400.0), (2600.0, 2650.0))),
    "flapping": (HOUR_S, _flapping, ()),
})  # fmt: skip
NAMES = tuple(_SHAPES)


def drawn(name: str, seed: int) -> Trace:
    """One of `NAMES`, the same for the same seed. Raises InvalidInput."""
    if name not in _SHAPES:
        raise InvalidInput("bad_trace", f"no trace {name[:64]!r}: a file, or one of {', '.join(NAMES)}", field="trace")
    seconds, shape, outages = _SHAPES[name]
    rng = random.Random(f"{name}/{seed}")
    arrivals: list[Arrival] = []
    at_s = 0.0
    # Thinning: candidates at the highest rate, each kept with the rate of its moment.
    top = max(shape(second)[0] for second in range(int(seconds)))
    while True:
        at_s += rng.expovariate(top)
        if at_s >= seconds:
            return Trace(name, tuple(arrivals), outages)
        rate, prompt, output = shape(at_s)
        if rng.random() * top <= rate:
            arrivals.append(Arrival(at_s, _length(rng, prompt), _length(rng, output)))


def _length(rng: random.Random, mean: float) -> int:
    """Log-normal with that mean: many short, a few very long."""
    sigma = 0.6
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
