"""Every door through which YAML of a user comes in: it is read strictly, and what is wrong is one typed error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cluster.strict_yaml
from cluster.autoscale.policy import policy_from
from cluster.cli.autoscale_policy import as_policy
from cluster.cli.main import USAGE, run
from cluster.config import load
from cluster.control.api import FleetControl
from cluster.gateway.identity import authenticator_from
from cluster.manifests import chart
from cluster.operators.fleet import FleetOperations
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import InvalidInput
from tests.support.odd_yaml import TEXTS

PACKAGES = ("kvstore", "model", "wire", "prefill", "decode", "cluster", "sim", "bench")
# Kubernetes' own texts, which are no files of Genlock's: octal modes and several documents are their custom.
FOREIGN = {"cluster/manifests/chart.py": 1}
DIGEST = "ab" * 32
# Where in a file an odd text stands.
PLACES = (
    "{}", "decode: {}", "autoscale: {}", "cache: {{page_tokens: {}}}", "tenants: {{a: {{tokens_sha256: [{}]}}}}",
    "tenants: {{a: {}}}",
)  # fmt: skip
ODD_TOML = (
    "a = " + "[" * 5000,
    "a." * 2000 + "a = 1",
    "cache.page_tokens." + "a." * 2000 + "a = 1",
    "[cache]\npage_tokens = 0x" + "f" * 5000,
    "[cache]\npage_tokens = " + "9" * 5000,
    "[cache]\npage_tokens = 2024-02-03",
    "[cache]\npage_tokens = [32]",
    "k" * 9000 + " = {a = 1}",
)


def bomb() -> str:
    """365 characters that stand for a million values, all under one field."""
    text = "prefill: [&b0 [x,x,x,x,x,x,x,x,x,x]"
    for level in range(1, 7):
        text += f", &b{level} [{','.join([f'*b{level - 1}'] * 10)}]"
    return text + "]"


class Fleetless:
    """Stands for a fleet that nothing reaches: what a text is refused for is known before."""

    async def view(self) -> None:
        raise LookupError("the text was let through")


def apply(text: str) -> None:
    operations = FleetOperations(cast(FleetControl, Fleetless()), lambda: 0.0)
    asyncio.run(operations.apply(pb.ApplyRequest(text=text), "me"))


# Door -> how a text comes in, and the reason of its errors.
DOORS: dict[str, tuple[Callable[[str], object], str]] = {
    "cluster file": (apply, "bad_cluster_file"),
    "settings": (lambda text: load(file_text=text, file_name="genlock.yaml"), "bad_config_file"),
    "tenants": (lambda text: authenticator_from(text, "tenants.yaml"), "bad_tenants_file"),
    "policy": (policy_from, "bad_policy"),
    "field of a policy": (lambda text: as_policy((f"stale_ms={text}",)), "bad_policy"),
    "value of a chart": (lambda text: chart.assignment(f"a.b={text}"), "bad_values"),
}
ODD = {
    "bomb": bomb(),
    "its own part": "autoscale: &a {slo: *a}",
    "a key twice": "{decode: 2, decode: 3}",
    "deep lists": "decode: " + "[" * 5000,
    "deep sections": "autoscale: " + "{a: " * 5000,
    "no such day": "decode: 2024-02-30",
    "no such month": "autoscale: 2024-13-45",
    "octal": "decode: 010",
    "many digits": "decode: " + "9" * 5000,
    "a tag": "decode: !!python/object:os.system x",
    "no character": "decode: \x00",
    "no text as key": "{decode: {1: 2}}",
    "two documents": "a: 1\n---\nb: 2",
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_odd_is_refused_at_every_door(door: str, odd: str) -> None:
    enter, reason = DOORS[door]
    # A value alone: the field that it is for stands before it.
    value = ODD[odd].partition(": ")[2] if door in ("field of a policy", "value of a chart") else ""
    text = value if value and not ODD[odd].startswith("{") else ODD[odd]
    with pytest.raises((InvalidInput, click.BadParameter)) as caught:
        enter(text)
    if isinstance(caught.value, InvalidInput):
        assert (caught.value.reason, bool(caught.value.field)) == (reason, True)
        assert len(caught.value.message) < 500


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, within=st.sampled_from(PLACES))
def test_no_text_brings_another_error(door: str, text: str, within: str) -> None:
    try:
        # A message holds no half of a character, and a file none either.
        DOORS[door][0](within.format(text).encode("utf-8", "ignore").decode())
    except (InvalidInput, click.BadParameter, LookupError) as error:
        assert not isinstance(error, LookupError) or str(error) == "the text was let through"  # noqa: PT017  # no error is right too


@pytest.mark.parametrize(
    ("door", "text", "field"),
    [
        ("cluster file", "decode: 1\nnodes: 2", "nodes"),
        ("cluster file", "decode: [1, 2]", "decode"),
        ("cluster file", "decode: {a: b}", "decode"),
        ("cluster file", "autoscale: []", "autoscale"),
        ("cluster file", "autoscale: {}", "autoscale"),
        ("cluster file", "autoscale: 0", "autoscale"),
        ("cluster file", "autoscale: false", "autoscale"),
        ("cluster file", "- decode", "text"),
        ("settings", "cache: {page_tokens: 010}", "cache.page_tokens"),
        ("settings", "cache: {page_tokens: [32]}", "cache.page_tokens"),
        ("settings", "cache: {page_tokens: '032'}", "cache.page_tokens"),
        ("settings", "cache: {page_tokens: '3_2'}", "cache.page_tokens"),
        ("settings", "[cache]", "config"),
        ("tenants", "tenants: [a]", "api.tenants_file"),
        ("tenants", "[tenants]", "api.tenants_file"),
        ("tenants", "tenants: {a: [tokens_sha256]}", "api.tenants_file"),
        ("tenants", f"tenants: {{a: {{tokens_sha256: {DIGEST}}}}}", "api.tenants_file"),
        ("tenants", "tenants: {a: {tokens_sha256: [1]}}", "api.tenants_file"),
        ("tenants", f"tenants: {{a: {{tokens_sha256: {{{DIGEST}: 1}}}}}}", "api.tenants_file"),
        ("tenants", f"tenants: {{a: {{tokens_sha256: [{DIGEST}, {DIGEST}]}}}}", "api.tenants_file"),
        ("tenants", f"tenants: {{a: {{tokens_sha256: [{DIGEST}], max_priority: [high]}}}}", "api.tenants_file"),
        ("policy", "slo: {ttft_ms: [1]}", "autoscale.slo.ttft_ms"),
        ("policy", "slo: {ttft_ms: 1, ttft_ms: 2}", "autoscale.slo.ttft_ms"),
    ],
)
def test_the_field_is_named_and_lists_and_sections_are_not_printed(door: str, text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        DOORS[door][0](text)
    assert caught.value.field == field
    assert not re.search(r"\[1|\[32|\{'|'high'|abab", caught.value.message)


def test_null_takes_a_policy_away() -> None:
    with pytest.raises(LookupError, match="let through"):
        apply("autoscale: null")


def test_a_bomb_costs_the_cluster_no_more_than_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    real = cluster.strict_yaml._Build.take

    def take(build: cluster.strict_yaml._Build, event: object) -> None:
        seen.append(event)
        real(build, event)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster.strict_yaml._Build, "take", take)
    with pytest.raises(InvalidInput, match="anchor"):
        apply(bomb())
    assert len(seen) < 10


@pytest.mark.parametrize("text", ODD_TOML, ids=range(len(ODD_TOML)))
def test_odd_toml_is_refused_as_well(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(file_text=text, file_name="genlock.toml")
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["apply", "-f"], "bad_cluster_file"),
        (["diff", "-f"], "bad_cluster_file"),
        (["autoscale", "set", "-f"], "bad_policy"),
        (["autoscale", "simulate", "--policy"], "bad_policy"),
        (["config", "--config"], "bad_config_file"),
        (["manifest", "render", "--values"], "bad_values"),
    ],
)
def test_commands_name_file_and_line_and_ask_nobody(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("prefill: {low: 1}\ndecode: 2024-02-30\n")
    trace = ["--trace", "steady"] if "simulate" in arguments else []
    assert run([*arguments[:2], *trace, *arguments[2:], str(file)]) == USAGE
    told = " ".join(capsys.readouterr().err.split())
    assert says in told
    assert "given.yaml line 2" in told.replace("given.yaml: line", "given.yaml line")


def test_fields_of_a_policy_are_named_once() -> None:
    assert as_policy(("slo={ttft_ms: 5}", "slo.token_ms=3")) == "slo:\n  token_ms: 3\n  ttft_ms: 5\n"
    for fields in (("mode=slo", "mode=slo"), ("slo.ttft_ms=1", "slo.ttft_ms=2"), ("slo=1", "slo.ttft_ms=2")):
        with pytest.raises(click.BadParameter, match="another"):
            as_policy(fields)


def test_no_other_reader_of_yaml_is_used() -> None:
    root = Path(cluster.strict_yaml.__file__).parents[1]
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            loads = re.findall(r"yaml\.(?:safe_|full_|unsafe_)?load(?:_all)?\(", path.read_text("utf-8"))
            if loads:
                found[str(path.relative_to(root))] = len(loads)
    assert found == FOREIGN
