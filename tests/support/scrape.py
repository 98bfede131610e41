"""Reads what a process tells Prometheus, over HTTP and with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0


def get(endpoint: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{endpoint}{path}", timeout=TIMEOUT_S) as answer:
        return answer.read().decode()


@dataclass(frozen=True)
class Scrape:
    """One scrape. `value` sums all samples of a name whose labels are as asked."""

    text: str
    families: tuple[Metric, ...]

    @classmethod
    def of(cls, text: str) -> Scrape:
        return cls(text, tuple(text_string_to_metric_families(text)))

    @property
    def samples(self) -> Iterable:
        return (sample for family in self.families for sample in family.samples)

    def value(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name}{labels} is not there"
        return sum(found)

    def by(self, name: str, *labels: str) -> dict:
        """Values by the named labels."""
        return {tuple(s.labels[one] for one in labels): s.value for s in self.samples if s.name == name}

    def names(self) -> dict[str, set[str]]:
        """Label names of each sample's name."""
        out: dict[str, set[str]] = {}
        for sample in self.samples:
            out.setdefault(sample.name, set()).update(sample.labels)
        return out


async def scrape(endpoint: str) -> Scrape:
    return Scrape.of(await asyncio.to_thread(get, endpoint))
