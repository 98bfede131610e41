"""Questions that `genlock doctor` asks in a process of their own: a bad library crashes its process, or hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass

LIMIT_S = 30.0
# Libraries print what they like on stdout; the answer is what follows this.
MARK = "genlock-doctor:"
NIXL = "from kvstore.transfer.nixl import NixlEngine as engine; answer = engine.available() or ''"
MOONCAKE = "from kvstore.transfer.mooncake import MooncakeEngine as engine; answer = engine.available() or ''"
# Ray's own way from `auto` to an address, and what the head has written down about itself.
RAY = """
import json
import ray
from ray._private import services
from ray._raylet import GcsClient
answer = {"ours": ray.__version__, "address": ADDRESS, "cluster": {}}
if ADDRESS == "auto":
    try:
        answer["address"] = services.get_ray_address_from_environment(ADDRESS, None)
    except ConnectionError:
        answer["address"] = ""
if answer["address"]:
    told = GcsClient(address=answer["address"]).internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=5)
    answer["cluster"] = json.loads(told or b"{}")
"""


@dataclass(frozen=True)
class Answer:
    """`value` is what the question found, `error` why there is none."""

    value: object = None
    error: str = ""


def ask(question: str, limit_s: float = LIMIT_S) -> Answer:
    """Runs code that leaves what it found in `answer`, as JSON can hold it."""
    code = f"{question}\nimport json\nprint('\\n{MARK}' + json.dumps(answer), flush=True)"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(error=f"does not answer within {limit_s:g} s")
    return verdict(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def verdict(code: int, out: str, err: str) -> Answer:
    """What a question's process said. One that was killed after its answer counts as killed: a library that crashes
    while it is unloaded takes the exit of its worker with it."""
    if code < 0:
        return Answer(error=f"crashes its process ({_signal_name(-code)})")
    answers = [line.removeprefix(MARK) for line in out.splitlines() if line.startswith(MARK)]
    if code == 0 and answers:
        return Answer(json.loads(answers[-1]))
    said = [line.strip() for line in err.splitlines() if line.strip()]
    return Answer(error=(said[-1] if said else f"ends with code {code}")[:200])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
