"""`genlock chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cluster.cli.options import client_options, endpoint_or_default
from kvstore.errors import GenlockError

if TYPE_CHECKING:
    from cluster.cli.client import Client

HELP = "/reset begins anew, /exit or Ctrl-D ends."


@click.command(
    epilog="""\b
Examples:
  genlock chat
  genlock chat --system "Answer in one sentence." --temperature 0.7"""
)
@client_options
@click.option("--system", help="What the model is told first.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens of one answer.")
@click.option("--temperature", type=float, help="0 is greedy (default).")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1))
def command(
    endpoint: str | None, token: str | None, timeout_s: float, system: str | None, max_tokens: int,
    temperature: float | None, seed: int | None,
) -> int:  # fmt: skip
    """Talks with the model; every turn sends the whole talk, whose beginning comes from the prefix cache."""
    from cluster.cli.client import run_async

    params = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    run_async(_chat(endpoint_or_default(endpoint), token, timeout_s, system, params))
    return 0


async def _chat(
    endpoint: str, token: str | None, timeout_s: float, system: str | None, params: dict[str, float | None]
) -> None:
    import asyncio

    from cluster.cli.client import connect

    async with connect(endpoint, token, timeout_s) as client:
        info = await client.model_info()
        click.echo(f"{info.model} at {endpoint}. {HELP}", err=True)
        turns: list[tuple[str, str]] = []
        while True:
            try:
                line = (await asyncio.to_thread(click.prompt, "you", prompt_suffix="> ", err=True)).strip()
            except (click.Abort, EOFError):
                click.echo(err=True)
                return
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                turns = []
                continue
            try:
                reply = await _answer(client, system, [*turns, ("user", line)], params)
            except GenlockError as error:
                # The talk goes on without the turn that failed.
                click.echo(f"Error: {error.message} ({error.reason})", err=True)
                continue
            turns += [("user", line), ("assistant", reply)]


async def _answer(
    client: Client, system: str | None, turns: list[tuple[str, str]], params: dict[str, float | None]
) -> str:
    from cluster.cli import render
    from genlock.v1 import inference_pb2 as pb

    request = pb.GenerateRequest()
    for name, value in params.items():
        if value is not None:
            setattr(request.sampling_params, name, value)
    if system:
        request.chat.messages.add(role="system", content=system)
    for role, content in turns:
        request.chat.messages.add(role=role, content=content)
    reply = ""
    async for message in client.generate(request):
        reply += message.text
        click.echo(message.text, nl=False)
        if message.HasField("finished"):
            click.echo()
            render.stderr().print(render.summary(message.finished), style="dim", markup=False)
    return reply
