"""`genlock demo`: a private cluster, one answer twice, and what was verified for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.options import cluster_options, load_settings, settings_options

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.cli.client import Client
    from cluster.launch.up import Cluster
    from cluster.settings import Config
    from genlock.v1 import inference_pb2 as pb
    from genlock.v1 import operator_pb2

DEFAULT_TEXT = "What is the capital of France?"
ANSWER_TIMEOUT_S = 120.0
ROUNDS = ("asked first", "asked again")


@click.command(
    epilog="""\b
Examples:
  genlock demo "What is the capital of France?"
  genlock demo --prefill 1 --decode 2 --max-tokens 24"""
)
@click.argument("text", default=DEFAULT_TEXT)
@cluster_options
@click.option("--max-tokens", type=int, default=48, show_default=True)
@settings_options
def command(
    text: str, in_process: bool, prefill: int | None, decode: int | None, model: str | None, engine: str | None,
    max_tokens: int, config_file: Path | None, assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Starts a private cluster on free ports, asks it TEXT twice, shows the answer and every check that was made on
    its KV pages, and stops the cluster."""
    from cluster.cli.up import cluster_flags

    flags = {**cluster_flags(prefill, decode, model, engine), "api.port": 0, "api.host": "127.0.0.1"}
    config = load_settings(config_file, assignments, flags).config
    from cluster.cli.up import make_cluster

    how = "in this process" if in_process else "as Ray actors"
    return asyncio.run(
        demonstrate(config, lambda report: make_cluster(config, report, in_process=in_process), text, max_tokens, how)
    )


async def demonstrate(
    config: Config, make: Callable[[Callable[[str], None]], Cluster], text: str, max_tokens: int, how: str
) -> int:
    """Runs the demo on the cluster that `make(report)` gives. Returns 0 only if all was as it must be, else 1."""
    from cluster.cli import render
    from cluster.cli.client import connect

    console = render.stderr()
    _phase(console, f"1. Starting {config.workers.prefill} prefill and {config.workers.decode} decode workers {how}")
    with console.status("Starting…") as spinner:

        def report(line: str) -> None:
            console.print(f"   {line}", markup=False)
            spinner.update(line)

        cluster = make(report)
        endpoint = await cluster.start()
    try:
        async with connect(endpoint, None, ANSWER_TIMEOUT_S) as client:
            _phase(console, "2. Asking; decode pulls the prompt's pages from prefill and verifies each one")
            click.echo(f"> {text}")
            first = await _ask(client, text, max_tokens, show=True)
            _phase(console, "3. Asking the same again; the prompt's full pages come from the prefix cache")
            second = await _ask(client, text, max_tokens, show=False)
            _phase(console, "4. What was verified")
            # The gateway knows counters as of its last look at the workers.
            await asyncio.sleep(2 * config.workers.status_poll_ms / 1000)
            status = await client.status()
    finally:
        _phase(console, "5. Stopping")
        await cluster.stop()
    # How tokens were gathered into messages may differ; the tokens may not.
    same = _token_ids(first) == _token_ids(second)
    _report(first, second, same)
    from cluster.cli.status import show

    show(status)
    click.echo()
    click.echo(
        "Both answers are equal, and no page was used that was not proved to be theirs."
        if same and not _failures(status)
        else "NOT as expected: see the tables above."
    )
    return 0 if same and not _failures(status) else 1


async def _ask(client: Client, text: str, max_tokens: int, *, show: bool) -> list[pb.GenerateResponse]:
    from cluster.cli.generate import make_request

    request = make_request(text, max_tokens=max_tokens, temperature=0.0)
    messages = []
    async for message in client.generate(request):
        messages.append(message)
        if show:
            click.echo(message.text, nl=False)
    if show:
        click.echo()
    return messages


def _token_ids(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def _report(first: list[pb.GenerateResponse], second: list[pb.GenerateResponse], same: bool) -> None:
    from cluster.cli import render

    rows = []
    for name, messages in zip(ROUNDS, (first, second), strict=True):
        end = messages[-1].finished
        checks, times = end.verification, end.timings
        rows.append(
            (
                name, end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens,
                checks.pages_received, render.size(checks.bytes_received), checks.read_checks, checks.write_checks,
                times.prefill_ms, times.transfer_ms, times.first_token_ms, times.per_token_ms, times.total_ms,
                f"{end.prefill_worker} → {end.decode_worker}",
            )
        )  # fmt: skip
    columns = (
        "prompt", "tokens", "cached", "answer", "pages", "bytes", "read checks", "write checks", "prefill ms",
        "transfer ms", "first token ms", "per token ms", "total ms", "workers",
    )  # fmt: skip
    out = render.stdout()
    out.print(render.table("", columns, rows))
    out.print(f"Same tokens both times: {'yes' if same else 'NO'}", markup=False)
    out.print()


def _failures(status: operator_pb2.GetStatusResponse) -> int:
    from cluster.cli.status import verification

    return sum(failed for _passed, failed in verification(status).values())


def _phase(console: Console, text: str) -> None:
    console.print(text, style="bold", markup=False)
