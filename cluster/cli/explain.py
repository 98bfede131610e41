"""`genlock explain`: needs no cluster."""

from __future__ import annotations

import click

from cluster.output import emit, output_option


@click.command(
    epilog="""\b
Examples:
  genlock explain digest_mismatch
  genlock explain RESOURCE_EXHAUSTED
  genlock explain                      # all of them
  genlock explain -o wide              # and what to do"""
)
@click.argument("code", required=False, default="")
@output_option
def command(code: str, output: str) -> int:
    """Says what an error's reason means and what to do. Without a reason: lists all."""
    from dataclasses import asdict

    from cluster.cli import render
    from cluster.operators.explain import codes, explain

    found = [explain(code)] if code else list(codes())
    trees = [{**asdict(one), "http_status": one.http_status} for one in found]

    def show(wide: bool) -> None:
        if code:
            one = found[0]
            click.echo(f"{one.code} ({one.status}, HTTP {one.http_status}): {one.meaning}")
            click.echo(f"{'A retry may help. ' if one.retry else ''}{one.action}")
            return
        columns = ("code", "status", "http", "retry", "meaning", *(("what to do",) if wide else ()))
        rows = [
            (one.code, one.status, one.http_status, one.retry, one.meaning, *((one.action,) if wide else ()))
            for one in found
        ]
        render.stdout().print(render.table("", columns, rows))

    emit(output, lambda: trees[0] if code else trees, show)
    return 0
