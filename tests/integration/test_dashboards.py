"""Dashboards, alerts, the runbook and the list of metrics name what a running cluster exposes, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from cluster.selftest.lab import load_subject
from tests.support.fake_workers import build_fake, config, load_fake
from tests.support.scrape import Scrape, scrape
from tests.support.telemetry_lab import telemetry_cluster

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
RUNBOOK = ROOT / "docs/runbook.md"
OBSERVABILITY = ROOT / "docs/observability.md"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
# Prometheus adds these to every sample, and `up` to every target.
ADDED = frozenset({"instance", "job"})
OF_PROMETHEUS = frozenset({"up"})
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


@dataclass(frozen=True)
class Exposed:
    labels: dict[str, set[str]]  # of each sample's name
    values: dict[str, set[str]]  # of each label
    families: dict[str, tuple[str, str]]  # name -> type, help


@pytest.fixture(scope="module")
def exposed() -> Exposed:
    async def all_parts() -> Exposed:
        labels: dict[str, set[str]] = {}
        values: dict[str, set[str]] = {}
        families: dict[str, tuple[str, str]] = {}
        subject = load_subject("probe")
        async with telemetry_cluster(subject) as lab:
            assert (await lab.see(subject.prompt("seen", 70), max_tokens=4, ignore_eos=True)).error is None
            await lab.idle()
            scrapes = [await lab.scrape(part) for part in ("gateway", "prefill", "decode")]
            for got in (*scrapes, await controller_scrape()):
                for name, names in got.names().items():
                    labels.setdefault(name, set()).update(names)
                for sample in got.samples:
                    for label, value in sample.labels.items():
                        values.setdefault(label, set()).add(value)
                families.update({f.name: (f.type, f.documentation) for f in got.families})
        return Exposed(labels, values, families)

    return asyncio.run(all_parts())


async def controller_scrape() -> Scrape:
    """Of a gateway's process with a controller in it."""
    running = Cluster(config(metrics__port=0), InProcessLauncher(build_fake), load_fake)
    await running.start()
    try:
        return await scrape(running.gateway.metrics_endpoint)
    finally:
        await running.stop(0)


def problems(query: str, exposed: Exposed) -> list[str]:
    """What the query names that is not there."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    found: list[str] = []
    grouped: set[str] = set()
    own: set[str] = set(ADDED)

    def visit(node: object) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.extend(selector_problems(node, exposed))
            own.update(exposed.labels.get(node.name, ()))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None:
            if node.modifier.matching is not None:
                grouped.update(node.modifier.matching.labels)
            grouped.update(node.modifier.group_labels or ())
        return True

    promql.walk(promql.parse(query), visit)
    found += [f"no sample here has the label {label}" for label in sorted(grouped - own)]
    return found


def selector_problems(selector: promql.VectorSelector, exposed: Exposed) -> list[str]:
    name = selector.name
    if name in OF_PROMETHEUS:
        return []
    if name not in exposed.labels:
        return [f"nobody exposes {name}"]
    found = []
    for matcher in selector.matchers.matchers:
        if matcher.name in ADDED:
            continue
        if matcher.name not in exposed.labels[name]:
            found.append(f"{name} has no label {matcher.name}")
            continue
        words = matcher.value.split("|")
        found += [f"{matcher.name} is never {word}" for word in words if word not in exposed.values[matcher.name]]
    return found


def panels() -> list[tuple[str, str, str]]:
    """(panel, query, legend) of every dashboard."""
    return [
        (f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"])
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def alerts() -> list[dict]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_panel_asks_for_what_is_there(exposed):
    assert len(panels()) > 20
    wrong = {panel: found for panel, query, _ in panels() if (found := problems(query, exposed))}
    assert not wrong
    known = set(exposed.values) | ADDED
    for panel, _, legend in panels():
        assert set(re.findall(r"{{(\w+)}}", legend)) <= known, panel


def test_every_alert_asks_for_what_is_there(exposed):
    assert len(alerts()) > 10
    wrong = {rule["alert"]: found for rule in alerts() if (found := problems(rule["expr"], exposed))}
    assert not wrong


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(genlock_request_total[5m])", "nobody exposes genlock_request_total"),
        ('genlock_requests_total{result="ok"}', "genlock_requests_total has no label result"),
        ('genlock_requests_total{outcome="okay"}', "outcome is never okay"),
        ("sum by (tenant) (genlock_leases)", "no sample here has the label tenant"),
        ("genlock_leases and on (worker) genlock_sequences", "no sample here has the label worker"),
    ],
)
def test_a_wrong_query_is_seen(exposed, query, problem):
    assert problems(query, exposed) == [problem]


def test_memory_stands_beside_effective_concurrency():
    [dashboard] = DASHBOARDS
    board = json.loads(dashboard.read_text())["panels"]
    places = [(panel["gridPos"]["y"], target["expr"]) for panel in board for target in panel.get("targets", ())]
    row = next(y for y, query in places if "genlock_pool_capacity_bytes" in query)
    together = " ".join(query for y, query in places if y == row)
    for name in ("genlock_pool_used_bytes", "genlock_sequences", "genlock_step_tokens", "genlock_step_batch_size"):
        assert name in together


def test_each_alert_has_its_page_in_the_runbook():
    sections = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    by_name = {section.splitlines()[0].strip(): section for section in sections}
    for rule in alerts():
        name = rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"]["summary"], name
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert name in by_name, f"docs/runbook.md has no section {name}"
        for part in ("**It means.**", "**Look at.**", "**Do.**"):
            assert part in by_name[name], f"{name}: {part}"
    assert {name for name in by_name if name.startswith("Genlock")} == {rule["alert"] for rule in alerts()}


def test_all_metrics_are_described(exposed):
    own = {name: about for name, about in exposed.families.items() if name.startswith("genlock_")}
    assert len(own) > 25
    listed = dict(re.findall(r"^\| `(genlock_\w+)` \| (\w+) \|", OBSERVABILITY.read_text(), flags=re.MULTILINE))
    assert listed == {name: kind for name, (kind, _) in own.items()}
