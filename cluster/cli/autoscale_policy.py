"""`genlock autoscale show|set|off|pause|resume|explain`."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.operate import call, change_options, mutation, operator_options, show
from cluster.cli.options import NAMED_FILE, judged_elsewhere
from kvstore.files import FileReader

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2 as pb

Table = tuple[str, tuple[str, ...], list[tuple[object, ...]]]


@click.command(
    epilog="""\b
Examples:
  genlock autoscale show
  genlock autoscale show -o yaml"""
)
@operator_options
def show_policy(endpoint: str | None, token: str | None, timeout_s: float, output: str) -> int:
    """Shows the policy and the last decision."""
    from genlock.v1 import operator_pb2 as pb

    _show(call(endpoint, token, timeout_s, "GetAutoscale", pb.GetAutoscaleRequest()), output)
    return 0


@click.command(
    epilog="""\b
Examples:
  genlock autoscale set -f policy.yaml
  genlock autoscale set mode=utilisation decode.low=2 decode.high=8
  genlock autoscale set slo.ttft_ms=1500 --dry-run

\b
With -f the file is the whole policy; fields that it leaves out get their defaults. Without, the named fields change and
the others stay. docs/autoscaler.md lists all fields."""
)
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("-f", "--file", "path", type=NAMED_FILE, metavar="FILE", help="YAML of a whole policy.")
@operator_options
@change_options
def set_policy(
    fields: tuple[str, ...], path: str | None, endpoint: str | None, token: str | None, timeout_s: float, output: str,
    **change: Any,
) -> int:  # fmt: skip
    """Gives the fleet a policy, or changes fields of the one it has."""
    from cluster.autoscale.policy import POLICY_TEXT
    from genlock.v1 import operator_pb2 as pb

    if bool(fields) == bool(path):
        raise click.UsageError("name fields as FIELD=VALUE, or a file with -f")
    text = as_policy(fields) if fields else _policy_text(str(path))
    request = pb.SetAutoscaleRequest(policy=text, merge=bool(fields), mutation=mutation(**change))
    with judged_elsewhere(POLICY_TEXT, text, path, "autoscale.") if path else nullcontext():
        view = call(endpoint, token, timeout_s, "SetAutoscale", request)
    _show(view, output)
    return 0


@click.command(
    epilog="""\b
Examples:
  genlock autoscale off --reason "sized by hand" """
)
@operator_options
@change_options
def off(endpoint: str | None, token: str | None, timeout_s: float, output: str, **change: Any) -> int:
    """Takes the policy away. The fleet keeps its counts."""
    from genlock.v1 import operator_pb2 as pb

    _show(call(endpoint, token, timeout_s, "SetAutoscale", pb.SetAutoscaleRequest(mutation=mutation(**change))), output)
    return 0


@click.command(
    epilog="""\b
Examples:
  genlock autoscale pause --reason "load test" """
)
@operator_options
@change_options
def pause(endpoint: str | None, token: str | None, timeout_s: float, output: str, **change: Any) -> int:
    """Keeps the policy and decides nothing."""
    return _pause("PauseAutoscale", endpoint, token, timeout_s, output, change)


@click.command(
    epilog="""\b
Examples:
  genlock autoscale resume"""
)
@operator_options
@change_options
def resume(endpoint: str | None, token: str | None, timeout_s: float, output: str, **change: Any) -> int:
    """Decides again."""
    return _pause("ResumeAutoscale", endpoint, token, timeout_s, output, change)


@click.command(
    epilog="""\b
Examples:
  genlock autoscale explain
  genlock autoscale explain --limit 1 -o json"""
)
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Decisions, newest first.")
@operator_options
def explain(limit: int, endpoint: str | None, token: str | None, timeout_s: float, output: str) -> int:
    """Shows the last decisions: what was measured, what each stage made of it, and why."""
    from genlock.v1 import operator_pb2 as pb

    request = pb.ExplainAutoscaleRequest(limit=limit)
    show(call(endpoint, token, timeout_s, "ExplainAutoscale", request), output, decision_tables)
    return 0


def _policy_text(path: str) -> str:
    """Raises InvalidInput, with the file's name and line, for what is no YAML."""
    from cluster.autoscale.policy import POLICY_TEXT

    text = FileReader("bad_policy", "file").text(path)
    POLICY_TEXT.tree(text, path)
    return text


def as_policy(fields: tuple[str, ...]) -> str:
    """`slo.ttft_ms=1500` and the like as YAML. Raises click.BadParameter."""
    import yaml

    from cluster.strict_yaml import YamlReader

    reader = YamlReader("bad_policy", "policy", "autoscale.")
    tree: dict[str, Any] = {}
    for text in fields:
        found = re.fullmatch(r"([a-z_]+)(?:\.([a-z_]+))?=(.+)", text)
        if found is None:
            raise click.BadParameter(f"{text!r} must read FIELD=VALUE, as in slo.ttft_ms=1500")
        section, leaf = found[1], found[2]
        value = reader.tree(found[3], text.partition("=")[0])
        within = tree.setdefault(section, {}) if leaf else tree
        if not isinstance(within, dict) or (leaf or section) in within:
            raise click.BadParameter(f"{text!r} names what another FIELD=VALUE has named")
        within[leaf or section] = value
    return yaml.safe_dump(tree)


def _pause(
    name: str, endpoint: str | None, token: str | None, timeout_s: float, output: str, change: dict[str, Any]
) -> int:
    from genlock.v1 import operator_pb2 as pb

    _show(call(endpoint, token, timeout_s, name, pb.PauseAutoscaleRequest(mutation=mutation(**change))), output)
    return 0


def _show(view: pb.AutoscaleView, output: str) -> None:
    show(view, output, policy_tables)


def policy_tables(view: pb.AutoscaleView, wide: bool) -> list[Table]:
    from cluster.autoscale.policy import leaves, policy_from
    from genlock.v1 import operator_pb2 as pb

    state = "paused" if view.paused else "on" if view.enabled else "off"
    rows: list[tuple[object, ...]] = []
    if view.policy:
        rows = list(leaves(policy_from(view.policy)).items())
    found: list[Table] = [(f"Autoscaling is {state} (revision {view.revision})", ("field", "value"), rows)]
    if view.changes:
        found.append(
            ("Changes", ("field", "before", "now"), [(one.field, one.before, one.after) for one in view.changes])
        )
    if view.HasField("last"):
        found += decision_tables(pb.ExplainAutoscaleResponse(decisions=[view.last]), wide)
    return found


def decision_tables(answer: pb.ExplainAutoscaleResponse, wide: bool) -> list[Table]:
    columns = ("time", "before", "raw", "clamped", "delayed", "target", "why")
    rows: list[tuple[object, ...]] = []
    for one in answer.decisions:
        at = datetime.fromtimestamp(one.at_ms / 1000, UTC).strftime("%H:%M:%SZ")
        stages = (one.before, one.raw, one.clamped, one.delayed, one.target)
        rows.append((at, *(f"{of.prefill}P + {of.decode}D" for of in stages), "; ".join(one.reasons)))
    found: list[Table] = [("Decisions", columns, rows)]
    if wide and answer.decisions:
        inputs: list[tuple[object, ...]] = [(name, value) for name, value in sorted(answer.decisions[0].inputs.items())]
        found.append(("Inputs of the newest", ("input", "value"), inputs))
    return found
