"""`genlock manifest`: the Kubernetes manifests, rendered and checked on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.options import NAMED_FILE, read_input
from cluster.output import emit, output_option, output_option_of
from kvstore.errors import InvalidInput
from kvstore.files import FileReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.manifests.view import Document

MANIFEST = FileReader("bad_manifest", "file", limit=16 << 20)


@click.group(
    epilog="""\b
Examples:
  genlock manifest values
  genlock manifest render --values laptop
  genlock manifest render --values mine.yaml --set gateway.replicas=3 -o yaml | kubectl apply -f -
  genlock manifest render --values mine.yaml | genlock manifest check -"""
)
def command() -> None:
    """Renders the Helm chart without helm and without a cluster, and checks what came out."""


@command.command(
    epilog="""\b
Examples:
  genlock manifest render --values laptop
  genlock manifest render --values h100-8-nodes --values mine.yaml --namespace llm
  genlock manifest render --set prefill.replicas=2 -o json
  genlock manifest render --values mine.yaml -o table"""
)
@click.option(
    "--values",
    "values_files",
    type=NAMED_FILE,
    multiple=True,
    metavar="FILE",
    help="Values: a file, or a shipped name. May repeat.",
)
@click.option("--set", "assignments", multiple=True, metavar="NAME.NAME=VALUE", help="One value. May repeat.")
@click.option("--name", default="genlock", show_default=True, help="Name of the release and of its RayCluster.")
@click.option("--namespace", default="default", show_default=True)
@click.option("--check/--no-check", default=True, show_default=True, help="Refuse manifests that break a rule.")
@output_option_of("yaml")
def render(
    values_files: tuple[str, ...], assignments: tuple[str, ...], name: str, namespace: str, check: bool, output: str
) -> int:
    """Prints the chart's manifests for the given values; later ones win. What they break of `genlock manifest check`
    goes to stderr."""
    from cluster.manifests import chart

    layers = [chart.read_values(chart.values_path(file)) for file in values_files]
    values = chart.merged([*layers, *map(chart.assignment, assignments)])
    documents = chart.render(values, name=name, namespace=namespace).documents
    if check and (findings := _findings(documents)):
        for finding in findings:
            click.echo(f"{finding[1]}: {finding[2]} ({finding[0]})", err=True)
        click.echo("Nothing was rendered; --no-check renders it as it is.", err=True)
        return 1
    if output == "yaml":
        # Documents for kubectl, whose settings files stay readable.
        click.echo(_yaml(documents), nl=False)
    else:
        tree = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        emit(output, lambda: tree, lambda wide: _print_documents(documents, wide))
    return 0


@command.command(
    epilog="""\b
Examples:
  genlock manifest check rendered.yaml
  helm template genlock deploy/helm/genlock -f mine.yaml | genlock manifest check -"""
)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@output_option
def check(file: Path, output: str) -> int:
    """Checks manifests in FILE (`-`: stdin) against Genlock's rules. Exit code 1 when one is broken."""
    from cluster.cli import render as terminal
    from cluster.manifests.chart import parse

    documents = parse(read_input(str(file), MANIFEST))
    if not documents:
        raise InvalidInput("bad_manifest", f"{file} holds no manifest", field="file")
    findings = _findings(documents)

    def show(_wide: bool) -> None:
        if findings:
            terminal.stdout().print(terminal.table("", ("rule", "where", "what is wrong"), findings))
        else:
            click.echo(f"{len(documents)} manifests, every rule holds", err=True)

    emit(output, lambda: [{"rule": rule, "where": where, "message": text} for rule, where, text in findings], show)
    return 1 if findings else 0


@command.command(
    epilog="""\b
Examples:
  genlock manifest values
  genlock manifest values laptop > mine.yaml"""
)
@click.argument("name", required=False)
def values(name: str | None) -> None:
    """Lists the shipped values files, or prints the one with NAME."""
    from cluster.manifests import chart

    if name is None:
        for known in chart.known_values():
            click.echo(known)
        return
    click.echo(chart.VALUES_FILE.text(chart.values_path(name)), nl=False)


@command.command(
    epilog="""\b
Examples:
  helm upgrade --install genlock "$(genlock manifest chart)" -f mine.yaml"""
)
def chart() -> None:
    """Prints the folder of the Helm chart."""
    from cluster.manifests.chart import chart_path

    click.echo(str(chart_path()))


def _findings(documents: Sequence[Document]) -> list[tuple[str, str, str]]:
    from cluster.manifests.rules import check

    return [(finding.rule, finding.where, finding.message) for finding in check(documents)]


def _print_documents(documents: Sequence[Document], wide: bool) -> None:
    from cluster.cli import render as terminal

    columns = ("kind", "name", *(("api version", "labels") if wide else ()))
    rows = []
    for document in documents:
        about = document["metadata"]
        labels = ", ".join(f"{key}={value}" for key, value in sorted(about.get("labels", {}).items()))
        more = (document["apiVersion"], labels) if wide else ()
        rows.append((document["kind"], about["name"], *more))
    terminal.stdout().print(terminal.table("", columns, rows))


def _yaml(documents: Sequence[Document]) -> str:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]  # which of the two is known when it runs
        """Texts of several lines, such as the settings file, stay readable."""

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return "".join(
        "---\n" + yaml.dump(document, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120)
        for document in documents
    )
