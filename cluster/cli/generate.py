"""`genlock generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cluster.cli.options import client_options, endpoint_or_default, read_input
from kvstore.files import FileReader

if TYPE_CHECKING:
    from genlock.v1 import inference_pb2 as pb


@click.command(
    epilog="""\b
Examples:
  genlock generate "What is the capital of France?" --max-tokens 32
  genlock generate "Once upon a time" --raw --temperature 0.8 --seed 7
  genlock generate "Name three rivers" --n 3 --temperature 1 -o json
  echo "Summarize: ..." | genlock generate - --stop "\\n\\n\""""
)
@click.argument("text")
@client_options
@click.option("--chat/--raw", "chat", default=True, show_default=True, help="As a user's message, or plain text.")
@click.option("--system", help="A system message before it (with --chat).")
@click.option("--max-tokens", type=int, help="Most tokens of the answer.")
@click.option("--temperature", type=float, help="0 is greedy (default).")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--min-p", type=float)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Same seed, same answer.")
@click.option("--stop", multiple=True, help="Ends the answer before this text. May repeat.")
@click.option("--logprobs", type=int, help="Log-probabilities of each token and of the k best.")
@click.option("--n", type=int, help="Independent answers.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Show text as it comes.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    text: str, endpoint: str | None, token: str | None, timeout_s: float, chat: bool, system: str | None, stream: bool,
    output: str, **params: Any,
) -> int:  # fmt: skip
    """Answers TEXT; `-` reads it from stdin. The answer goes to stdout, what it took to stderr."""
    from cluster.cli.client import run_async
    from kvstore.errors import InvalidInput
    from wire.options import MAX_MESSAGE_BYTES

    if text == "-":
        # No longer message is sent.
        text = read_input(text, FileReader("bad_prompt", "text", MAX_MESSAGE_BYTES))
        if not text.strip():
            raise InvalidInput("empty_prompt", "nothing came on stdin", field="text")
    request = make_request(text, chat=chat, system=system, stream=stream and output == "text", **params)
    run_async(_generate(endpoint_or_default(endpoint), token, timeout_s, request, output))
    return 0


def make_request(
    text: str, *, chat: bool = True, system: str | None = None, stream: bool = True, **params: Any
) -> pb.GenerateRequest:
    """`params`: fields of SamplingParams; None means not given. Checks are the gateway's."""
    from genlock.v1 import inference_pb2 as pb

    given = {name: value for name, value in params.items() if value is not None}
    try:
        sampling = pb.SamplingParams(**given)
    except ValueError as error:  # a number that the field cannot hold
        raise click.UsageError(str(error)) from error
    request = pb.GenerateRequest(sampling_params=sampling, stream=stream)
    if not chat:
        request.text = text
        return request
    if system:
        request.chat.messages.add(role="system", content=system)
    request.chat.messages.add(role="user", content=text)
    return request


async def _generate(
    endpoint: str, token: str | None, timeout_s: float, request: pb.GenerateRequest, output: str
) -> None:
    from cluster.cli import render
    from cluster.cli.client import connect

    messages: list[pb.GenerateResponse] = []
    live = request.stream and request.sampling_params.n <= 1
    async with connect(endpoint, token, timeout_s) as client:
        async for message in client.generate(request):
            messages.append(message)
            if live:
                click.echo(message.text, nl=False)
    if output == "json":
        render.print_json(_document(messages))
        return
    if live:
        click.echo()
    answers = _answers(messages)
    for index, parts in answers.items():
        if not live:
            if len(answers) > 1:
                click.echo(f"--- {index}")
            click.echo("".join(part.text for part in parts))
        _print_logprobs(parts)
        render.stderr().print(render.summary(parts[-1].finished), style="dim", markup=False)


def _answers(messages: list[pb.GenerateResponse]) -> dict[int, list[pb.GenerateResponse]]:
    out: dict[int, list[pb.GenerateResponse]] = {}
    for message in sorted(messages, key=lambda message: message.index):
        out.setdefault(message.index, []).append(message)
    return out


def _document(messages: list[pb.GenerateResponse]) -> dict[str, Any]:
    from cluster.cli import render

    choices = []
    for index, parts in _answers(messages).items():
        choices.append(
            {
                "index": index,
                "text": "".join(part.text for part in parts),
                "token_ids": [token for part in parts for token in part.token_ids],
                "logprobs": [render.as_dict(entry) for part in parts for entry in part.logprobs],
                "finished": render.as_dict(parts[-1].finished),
            }
        )
    return {"server_id": messages[0].server_id if messages else "", "choices": choices}


def _print_logprobs(parts: list[pb.GenerateResponse]) -> None:
    from cluster.cli import render

    rows = [
        (
            repr(entry.text),
            entry.token_id,
            f"{entry.logprob:.3f}",
            "  ".join(f"{best.text!r} {best.logprob:.3f}" for best in entry.top),
        )
        for part in parts
        for entry in part.logprobs
    ]
    if rows:
        render.stdout().print(render.table("", ("token", "id", "logprob", "best"), rows))
