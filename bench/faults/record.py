"""What one fault kind's row is made of, and how it names its tests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Short names of repositories in `sources`; others are written in full.
REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "sglang": "sgl-project/sglang",
    "dynamo": "ai-dynamo/dynamo",
    "llmd": "llm-d/llm-d",
    "llmd-router": "llm-d/llm-d-router",
    "lmcache": "LMCache/LMCache",
    "mooncake": "kvcache-ai/Mooncake",
    "nixl": "ai-dynamo/nixl",
    "ray": "ray-project/ray",
    "kuberay": "ray-project/kuberay",
    "aibrix": "vllm-project/aibrix",
    "trtllm": "NVIDIA/TensorRT-LLM",
}


@dataclass(frozen=True)
class Fault:
    """One kind. `elsewhere` is said in our words of what `sources` report, as they were in September 2026.

    `shown` and `control` name proofs: `row 4` (of `genlock selftest`), `tests/…::test_name`, `sim site` (a fault of
    `genlock sim`), `without check` (a negative control, as of `genlock sim --without CHECK`). A kind that cannot occur says why in
    `here`. A kind without a control says in `no_control` why there is none. `not_yet`: what is missing, said as it is.
    """

    number: int
    title: str
    sources: tuple[str, ...]
    elsewhere: str
    here: str
    shown: tuple[str, ...]
    control: tuple[str, ...] = ()
    no_control: str = ""
    not_yet: str = ""


def address(source: str) -> str:
    """The web address of `vllm#1` or `owner/name#1`, as a link; behind the # may be an advisory, `GHSA-…`."""
    name, number = source.split("#")
    place = f"security/advisories/{number}" if number.startswith("GHSA-") else f"issues/{number}"
    return f"[{source}](https://github.com/{REPOSITORIES.get(name, name)}/{place})"
