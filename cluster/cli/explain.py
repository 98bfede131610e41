"""`genlock explain`: needs no cluster."""

from __future__ import annotations

import click


@click.command(
    epilog="""\b
Examples:
  genlock explain digest_mismatch
  genlock explain RESOURCE_EXHAUSTED
  genlock explain                      # all of them"""
)
@click.argument("code", required=False, default="")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
def command(code: str, output: str) -> int:
    """Says what an error's reason means and what to do. Without a reason: lists all."""
    from dataclasses import asdict

    from cluster.cli import render
    from cluster.operators.explain import codes, explain

    found = [explain(code)] if code else list(codes())
    trees = [{**asdict(one), "http_status": one.http_status} for one in found]
    if output == "json":
        render.print_json(trees[0] if code else trees)
    elif output == "yaml":
        import yaml

        click.echo(yaml.safe_dump(trees[0] if code else trees, sort_keys=False, width=120).rstrip())
    elif code:
        one = found[0]
        click.echo(f"{one.code} ({one.status}, HTTP {one.http_status}): {one.meaning}")
        click.echo(f"{'A retry may help. ' if one.retry else ''}{one.action}")
    else:
        rows = [(one.code, one.status, one.http_status, one.retry, one.meaning) for one in found]
        render.stdout().print(render.table("", ("code", "status", "http", "retry", "meaning"), rows))
    return 0
