"""Rendered manifests for tests, and schemas that judge them."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.manifests.chart import known_values, read_values, render, values_path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "genlock"
# The chart as it is, and with each shipped values file.
DEFAULTS = "defaults"
SHIPPED = (DEFAULTS, *known_values())
# KubeRay's RayCluster CRD is larger than this repository may be for one test: give its place, or put it in
# deploy/crds or beside the checkout.
CRD_VARIABLE = "RAYCLUSTER_CRD"
CRD_NAME = "ray.io_rayclusters.yaml"
CRD_FILE = ROOT / "deploy" / "crds" / CRD_NAME
CRD_PLACES = (CRD_FILE, ROOT.parent / "shared" / "crds" / CRD_NAME)
ESSENTIALS = ROOT / "tests" / "deploy" / "raycluster-essentials.yaml"
KUBERNETES = ("1.29", "1.37")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Document = dict[str, Any]


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install -r requirements/deploy.txt")


@functools.lru_cache(maxsize=8)
def _rendered(name: str) -> tuple[Any, ...]:
    values = {} if name == DEFAULTS else read_values(values_path(name))
    return render(values, name="genlock", namespace="llm").documents


def manifests(name: str = DEFAULTS) -> list[Document]:
    """The documents of a values file: a copy that the test may change."""
    need("helm_python")
    return copy.deepcopy(list(_rendered(name)))


def one(documents: list[Document], kind: str, name: str = "") -> Document:
    found = [d for d in documents if d["kind"] == kind and (not name or d["metadata"]["name"] == name)]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def group(documents: list[Document], role: str) -> Document:
    groups = one(documents, "RayCluster")["spec"]["workerGroupSpecs"]
    return next(entry for entry in groups if entry["groupName"] == role)


def container(pod_template: Document) -> Document:
    return pod_template["spec"]["containers"][0]


def crd_path(places: tuple[Path, ...] = CRD_PLACES) -> Path | None:
    given = os.environ.get(CRD_VARIABLE)
    return next((path for path in ((Path(given),) if given else places) if path.is_file()), None)


@functools.lru_cache(maxsize=1)
def crd_schema(path: Path) -> Document:
    crd = yaml.load(path.read_text(), LOADER)
    version = next(entry for entry in crd["spec"]["versions"] if entry["name"] == "v1")
    return version["schema"]["openAPIV3Schema"]


def strict(schema: Any) -> Any:
    """An openAPIV3Schema as JSON schema that refuses unknown fields, as a server's strict validation does."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out.pop("pattern", None)
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if "properties" in schema:
        out["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
    return out


def schema_errors(schema: Document, document: Document) -> list[str]:
    from jsonschema import Draft202012Validator

    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.path))}: {error.message[:160]}" for error in found]


def with_defaults(value: Any, schema: Document) -> Any:
    """Nulls go, defaults come: what a server does before it evaluates rules."""
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        out = {}
        for key, entry in value.items():
            own = known.get(key) or (more if isinstance(more, dict) else {})
            if entry is not None or own.get("nullable"):
                out[key] = with_defaults(entry, own)
        return out | {key: own["default"] for key, own in known.items() if "default" in own and key not in out}
    if isinstance(value, list):
        return [with_defaults(entry, schema.get("items", {})) for entry in value]
    return value


def cel_errors(schema: Document, value: Any, path: str = "") -> Iterator[str]:
    """Rules of x-kubernetes-validations that do not hold. Rules about a change need an old object and are left out."""
    import cel

    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not cel.evaluate(rule["rule"], {"self": value}):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for key, entry in value.items():
            if key in schema.get("properties", {}):
                yield from cel_errors(schema["properties"][key], entry, f"{path}.{key}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from cel_errors(schema.get("items", {}), entry, f"{path}[{index}]")


def ray_flags() -> frozenset[str]:
    """Options of the `ray` command, read from its source: importing it takes seconds and warns."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "scripts" / "scripts.py").read_text()
    return frozenset(re.findall(r'"(--[a-z-]+)"', text))
