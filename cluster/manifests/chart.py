"""Renders the Helm chart. The helm SDK is optional (extra `deploy`) and imported when it is used."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.strict_yaml import YamlReader, shown
from kvstore.errors import InvalidInput, NotFound, Unavailable
from kvstore.files import FileReader

# Beside the rooms, in a checkout and as installed alike.
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VALUES_FILE = FileReader("bad_values", "values")
# Helm reads the same files, and they share groups by anchors.
VALUES_TEXT = YamlReader(VALUES_FILE.reason, VALUES_FILE.field, None, aliases=True)
ASSIGNED_TEXT = YamlReader("bad_values", "set", None)
INSTALL = "pip install 'helm-python-sdk==0.2.2'"
# Kubernetes names of releases and namespaces; the release's name is a prefix of longer ones.
MAX_NAME = 40

Values = Mapping[str, Any]
# Ten times as fast where PyYAML was built with libyaml; safe either way.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Rendered:
    """`documents` in the order of the chart's files; `notes` is what an installation would print."""

    documents: tuple[Mapping[str, Any], ...]
    notes: str


def chart_path(deploy: Path = DEPLOY) -> Path:
    """The chart's folder. Raises NotFound where this installation has none."""
    path = deploy / "helm" / "genlock"
    if not (path / "Chart.yaml").is_file():
        raise NotFound(
            "no_chart",
            f"the chart is not at {path}: install Genlock from its wheel or run from a checkout",
            field="chart",
        )
    return path


def known_values(deploy: Path = DEPLOY) -> tuple[str, ...]:
    """Names of the values files that are shipped."""
    return tuple(sorted(path.stem for path in (deploy / "helm" / "values").glob("*.yaml")))


def values_path(name: str, deploy: Path = DEPLOY) -> Path:
    """A file of the user, or a shipped one by its bare name. Raises NotFound."""
    own = Path(name)
    if own.is_file():
        return own
    shipped = deploy / "helm" / "values" / f"{name}.yaml"
    if own.name == name and shipped.is_file():
        return shipped
    raise NotFound(
        "no_values",
        f"--values {name} is no file, and no shipped one ({', '.join(known_values(deploy))})",
        field="values",
    )


def read_values(path: Path) -> Values:
    """Raises InvalidInput for what is not a mapping in YAML."""
    tree = VALUES_TEXT.tree(VALUES_FILE.text(path), str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise VALUES_TEXT.error(f"= {shown(tree)} must hold sections, as in `gateway: {{replicas: 2}}`", str(path))
    return tree


def assignment(text: str) -> Values:
    """`a.b.c=value` as nested values; the value is read as YAML. Raises InvalidInput."""
    key, equals, raw = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise InvalidInput("bad_values", f"--set {text!r} must read NAME.NAME=VALUE", field="set")
    value = ASSIGNED_TEXT.tree(raw, f"--set {shown(key)[1:-1]}")
    out: Any = "" if value is None else value
    for name in reversed(names):
        out = {name: out}
    nested: Values = out
    return nested


def merged(layers: Iterable[Values]) -> Values:
    """Later layers win, mapping by mapping, as Helm merges them."""
    out: dict[str, Any] = {}
    for layer in layers:
        _merge(out, layer)
    return out


def _merge(into: dict[str, Any], layer: Values) -> None:
    for key, value in layer.items():
        here = into.get(key)
        if isinstance(here, dict) and isinstance(value, dict):
            _merge(here, value)
        else:
            # YAML anchors make two names of one object; a later change of one must not reach the other.
            into[key] = copy.deepcopy(value)


def render(values: Values, *, name: str, namespace: str, deploy: Path = DEPLOY) -> Rendered:
    """The chart with these values. Raises InvalidInput (values that the chart refuses), NotFound or Unavailable."""
    for field, text in (("name", name), ("namespace", namespace)):
        if not _is_name(text):
            raise InvalidInput(
                "bad_name", f"--{field} {text!r} must be 1 to {MAX_NAME} of a-z, 0-9 and -, a letter first", field=field
            )
    try:
        import helm_python
    except ImportError as error:
        raise Unavailable("no_helm", f"rendering needs Helm's SDK, which is not installed: {INSTALL}") from error
    try:
        with helm_python.Chart.load(chart_path(deploy)) as chart:
            files = chart.render(dict(values), name=name, namespace=namespace)
    except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
        raise InvalidInput("bad_values", " ".join(str(error).split())[:1000], field="values") from error
    except helm_python.HelmError as error:
        raise Unavailable("helm_failed", f"the chart cannot be rendered: {error}") from error
    notes = "".join(text for file, text in files.items() if file.endswith("NOTES.txt"))
    texts = (files[file] for file in sorted(files) if file.endswith(".yaml"))
    return Rendered(tuple(document for text in texts for document in parse(text)), notes.strip())


def parse(text: str) -> tuple[Mapping[str, Any], ...]:
    """YAML documents that are objects; empty ones are left out. Raises InvalidInput."""
    try:
        documents = tuple(document for document in yaml.load_all(text, _LOADER) if document is not None)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise InvalidInput("bad_manifest", " ".join(str(error).split())[:300], field="manifest") from error
    for document in documents:
        if not isinstance(document, dict) or not document.get("kind"):
            raise InvalidInput("bad_manifest", "a document is no Kubernetes object: it has no kind", field="manifest")
    return documents


def _is_name(text: str) -> bool:
    return (
        1 <= len(text) <= MAX_NAME
        and text[0].isascii()
        and text[0].isalpha()
        and text[-1] != "-"
        and all(char in "abcdefghijklmnopqrstuvwxyz0123456789-" for char in text)
    )
