"""The autoscaler's policy: what an operator writes, checked. Pure.

mode: slo                    # or utilisation
slo: {ttft_ms: 2000, token_ms: 50}
utilisation: {prefill: 0.7, decode: 0.7, pages: 0.85}
prefill: {low: 1, high: 8}
decode: {low: 1, high: 16}
gpus: {budget: 0, per_prefill: 8, per_decode: 8}
ratio: {low: 0.0, high: 0.0}       # prefill workers for one decode worker; 0: no bound
up: {delay_ms: 30000, step: 4}
down: {delay_ms: 600000, step: 1}
stale_ms: 30000
to_zero: {enabled: false, idle_ms: 1800000}
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import yaml

from cluster.roles import MAX_WORKERS
from cluster.strict_yaml import Tree, YamlReader, shown
from kvstore.errors import InvalidInput

POLICY_TEXT = YamlReader("bad_policy", "policy", "autoscale.", max_chars=16_384)
DAY_MS = 86_400_000


class Mode(StrEnum):
    SLO = "slo"
    UTILISATION = "utilisation"


@dataclass(frozen=True)
class SloTargets:
    """What a request should see: time to the first token, and time for each further one."""

    ttft_ms: float = 2000.0
    token_ms: float = 50.0


@dataclass(frozen=True)
class UtilisationTargets:
    """Fractions of what the ready workers can do. Decode's also bound how full SLO mode lets a batch become."""

    prefill: float = 0.7
    decode: float = 0.7
    pages: float = 0.85


@dataclass(frozen=True)
class Bounds:
    low: int = 1
    high: int = 8


@dataclass(frozen=True)
class Gpus:
    """`budget` 0: none."""

    budget: int = 0
    per_prefill: int = 8
    per_decode: int = 8


@dataclass(frozen=True)
class Ratio:
    """Prefill workers for one decode worker; 0: no bound on that side."""

    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class Pace:
    """A wish must last for `delay_ms`; then at most `step` workers at once."""

    delay_ms: int = 30_000
    step: int = 4


@dataclass(frozen=True)
class ToZero:
    enabled: bool = False
    idle_ms: int = 1_800_000


@dataclass(frozen=True)
class Policy:
    mode: Mode = Mode.SLO
    slo: SloTargets = field(default_factory=SloTargets)
    utilisation: UtilisationTargets = field(default_factory=UtilisationTargets)
    prefill: Bounds = field(default_factory=Bounds)
    decode: Bounds = field(default_factory=Bounds)
    gpus: Gpus = field(default_factory=Gpus)
    ratio: Ratio = field(default_factory=Ratio)
    up: Pace = field(default_factory=Pace)
    down: Pace = field(default_factory=lambda: Pace(600_000, 1))
    # Signals older than this are not used.
    stale_ms: int = 30_000
    to_zero: ToZero = field(default_factory=ToZero)


# Field -> lowest and highest allowed value.
_RANGES: dict[str, tuple[float, float]] = {
    "slo.ttft_ms": (1, DAY_MS),
    "slo.token_ms": (0.01, DAY_MS),
    "utilisation.prefill": (0.05, 1.0),
    "utilisation.decode": (0.05, 1.0),
    "utilisation.pages": (0.05, 1.0),
    "prefill.low": (0, MAX_WORKERS),
    "prefill.high": (1, MAX_WORKERS),
    "decode.low": (0, MAX_WORKERS),
    "decode.high": (1, MAX_WORKERS),
    "gpus.budget": (0, 1 << 20),
    "gpus.per_prefill": (0, 1024),
    "gpus.per_decode": (0, 1024),
    "ratio.low": (0, MAX_WORKERS),
    "ratio.high": (0, MAX_WORKERS),
    "up.delay_ms": (0, DAY_MS),
    "up.step": (1, MAX_WORKERS),
    "down.delay_ms": (0, DAY_MS),
    "down.step": (1, MAX_WORKERS),
    "stale_ms": (100, DAY_MS),
    "to_zero.idle_ms": (1000, DAY_MS),
}


def policy_from(text: str, base: Policy | None = None) -> Policy:
    """The policy of a YAML text; fields that it leaves out are those of `base` (by default the defaults).

    Raises InvalidInput (`bad_policy`) naming the field, what is wrong and the fix.
    """
    return policy_of(POLICY_TEXT.tree(text), base)


def policy_of(tree: Tree, base: Policy | None = None) -> Policy:
    """The policy of what a YAML reader made; None: `base`. Raises as `policy_from` does."""
    policy = base or Policy()
    if tree is None:
        return policy
    merged: Policy = _merged(policy, tree, "")
    _check_together(merged)
    return merged


def text_of(policy: Policy) -> str:
    """The policy as YAML, all fields, in order; `policy_from` reads it back to an equal one."""
    tree = dataclasses.asdict(policy)
    tree["mode"] = policy.mode.value
    return yaml.safe_dump(tree, sort_keys=False)


def values(policy: Policy) -> dict[str, str | bool | int | float]:
    """Every field by its dotted name."""
    out: dict[str, str | bool | int | float] = {}
    for name, value in dataclasses.asdict(policy).items():
        if isinstance(value, dict):
            out.update({f"{name}.{leaf}": item for leaf, item in value.items()})
        else:
            out[name] = getattr(value, "value", value)
    return out


def leaves(policy: Policy) -> dict[str, str]:
    """The same as text: for diffs."""
    return {name: str(value) for name, value in values(policy).items()}


def _bad(name: str, wrong: str) -> InvalidInput:
    return POLICY_TEXT.error(wrong, path=name)


def _merged(section: Any, tree: object, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise _bad(prefix.rstrip("."), "must be a section with fields, as in `slo: {ttft_ms: 2000}`")
    known = {spec.name: spec for spec in dataclasses.fields(section)}
    changes: dict[str, Any] = {}
    for name, raw in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            hint = difflib.get_close_matches(str(name), known, n=1)
            meant = f"; did you mean {prefix}{hint[0]}" if hint else ""
            raise _bad(key, f"is no field{meant}; known: {', '.join(f'{prefix}{field}' for field in known)}")
        before = getattr(section, name)
        if dataclasses.is_dataclass(before):
            changes[name] = _merged(before, raw, f"{key}.")
        else:
            changes[name] = _value(key, raw, before)
    return replace(section, **changes)


def _value(key: str, raw: object, before: object) -> object:
    if isinstance(before, Mode):
        if not isinstance(raw, str) or raw not in tuple(Mode):
            raise _bad(key, f"= {shown(raw)} must be one of {', '.join(Mode)}")
        return Mode(raw)
    if isinstance(before, bool):
        if not isinstance(raw, bool):
            raise _bad(key, f"= {shown(raw)} must be true or false")
        return raw
    low, high = _RANGES[key]
    whole = isinstance(before, int)
    kind = "a whole number" if whole else "a number"
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
        raise _bad(key, f"= {shown(raw)} must be {kind} from {low:g} to {high:g}")
    if (whole and raw != int(raw)) or not low <= raw <= high:
        raise _bad(key, f"= {raw:g} must be {kind} from {low:g} to {high:g}")
    return int(raw) if whole else float(raw)


def _check_together(policy: Policy) -> None:
    for name, bounds in (("prefill", policy.prefill), ("decode", policy.decode)):
        if bounds.low > bounds.high:
            raise _bad(f"{name}.low", f"= {bounds.low} is above {name}.high = {bounds.high}")
        if bounds.low == 0 and not policy.to_zero.enabled:
            raise _bad(f"{name}.low", "= 0 needs to_zero: {enabled: true}; else at least 1")
    if (policy.prefill.low == 0) != (policy.decode.low == 0):
        raise _bad("prefill.low", "and decode.low must both be 0 or both be above 0: one role alone serves nothing")
    gpus = policy.gpus
    # What a running fleet needs at least; zero workers are no fleet.
    least = max(1, policy.prefill.low) * gpus.per_prefill + max(1, policy.decode.low) * gpus.per_decode
    if gpus.budget and least > gpus.budget:
        raise _bad("gpus.budget", f"= {gpus.budget} is below what the least fleet needs, {least} GPUs")
    ratio = policy.ratio
    if ratio.low and ratio.high and ratio.low > ratio.high:
        raise _bad("ratio.low", f"= {ratio.low:g} is above ratio.high = {ratio.high:g}")
    if ratio.high and max(1, policy.prefill.low) / policy.decode.high > ratio.high:
        raise _bad("ratio.high", f"= {ratio.high:g} cannot be met within the bounds of prefill and decode")
    if ratio.low and policy.prefill.high / max(1, policy.decode.low) < ratio.low:
        raise _bad("ratio.low", f"= {ratio.low:g} cannot be met within the bounds of prefill and decode")
