"""Looks at Kubernetes documents: pods wherever they are nested, and their settings. Pure; never raises on odd input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Document = Mapping[str, Any]
WORKLOADS = frozenset({"Deployment", "StatefulSet", "DaemonSet", "Job"})


@dataclass(frozen=True)
class Pod:
    """A pod template. `group` is the worker group's name, `head`, or empty outside a RayCluster; `offered` are the
    resources of its own that it offers Ray."""

    where: str
    kind: str
    group: str
    labels: Mapping[str, Any]
    spec: Document
    offered: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def places(self) -> int:
        """How many workers Ray may place in it."""
        amount = self.offered.get(self.group, 1)
        return amount if isinstance(amount, int) else 1

    @property
    def is_worker(self) -> bool:
        return self.kind == "RayCluster" and self.group != "head"

    @property
    def containers(self) -> tuple[Document, ...]:
        return tuple(items(self.spec, "initContainers")) + tuple(items(self.spec, "containers"))


def name_of(document: Document) -> str:
    return f"{document.get('kind', '?')}/{get(document, 'metadata', 'name', default='?')}"


def get(value: Any, *path: str, default: Any = None) -> Any:
    """The value at a path of keys, or `default` where the path ends early or at null."""
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return default if value is None else value


def items(value: Any, *path: str) -> Iterator[Document]:
    """The objects of a list at a path."""
    found = get(value, *path, default=())
    if isinstance(found, Sequence) and not isinstance(found, str):
        yield from (entry for entry in found if isinstance(entry, Mapping))


def of_kind(documents: Sequence[Document], *kinds: str) -> Iterator[Document]:
    return (document for document in documents if document.get("kind") in kinds)


def pods(documents: Sequence[Document]) -> Iterator[Pod]:
    for document in documents:
        kind, where = str(document.get("kind")), name_of(document)
        if kind in WORKLOADS:
            yield _pod(where, kind, "", get(document, "spec", "template", default={}))
        elif kind == "Pod":
            yield _pod(where, kind, "", document)
        elif kind == "RayCluster":
            head = get(document, "spec", "headGroupSpec", "template", default={})
            yield _pod(f"{where} head", kind, "head", head)
            for group in items(document, "spec", "workerGroupSpecs"):
                group_name = str(group.get("groupName", "?"))
                own = ray_resources(group)
                yield _pod(f"{where} {group_name}", kind, group_name, group.get("template") or {}, own)


def ray_resources(group: Document) -> dict[str, Any]:
    """What a group offers Ray. KubeRay puts the text on a shell's command line, so it is quoted once more."""
    try:
        found = json.loads(json.loads(get(group, "rayStartParams", "resources", default='"{}"')))
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _pod(where: str, kind: str, group: str, template: Document, offered: Mapping[str, Any] | None = None) -> Pod:
    labels, spec = get(template, "metadata", "labels", default={}), get(template, "spec", default={})
    return Pod(where, kind, group, labels, spec, offered or {})


def env(container: Document) -> Iterator[Document]:
    return items(container, "env")


def plain_env(pod: Pod) -> dict[str, str]:
    """Variables with their values in the manifest; those from elsewhere are left out."""
    return {
        str(entry.get("name")): str(entry["value"])
        for container in pod.containers
        for entry in env(container)
        if "value" in entry
    }


def selects(selector: Any, labels: Mapping[str, Any]) -> bool:
    """Whether a label selector matches, with its expressions of In, NotIn, Exists and DoesNotExist."""
    wanted = get(selector, "matchLabels", default={})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for rule in items(selector, "matchExpressions"):
        value, operator = labels.get(str(rule.get("key"))), rule.get("operator")
        values = rule.get("values") or ()
        good = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }.get(str(operator), False)
        if not good:
            return False
    return True
