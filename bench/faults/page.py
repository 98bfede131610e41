"""docs/faults.md as text. Pure: the data of this package and what was measured in, Markdown out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.faults import controls, kinds_a, kinds_b, kinds_c, kinds_d
from bench.faults.found import FOUND, Found
from bench.faults.proofs import rows
from bench.faults.record import Fault, address
from bench.peers.cases import CASES, Outcome, Verdict, summarise

GROUPS: tuple[tuple[str, tuple[Fault, ...]], ...] = (
    ("A. Another request's KV, or stale KV, becomes an answer", kinds_a.KINDS),
    ("B. The transfer says done, but bytes are missing, early, cut or mixed", kinds_b.KINDS),
    ("C. Hangs, leaks and lives of processes", kinds_c.KINDS),
    ("D. What an API answers differently once prefill and decode are apart", kinds_d.KINDS),
)
FAULTS = tuple(fault for _, faults in GROUPS for fault in faults)
MEASURED = Path(__file__).parent / "measured"

FIVE = (
    ("unknown transfer id", "200, right (recomputed)", "unknown-id", "1"),
    ("block ids outside the pool", "200, garbage", "out-of-range", "2"),
    ("a reference used again", "200, garbage", "consumed-recycled", "3"),
    ("a reference kept until its blocks were recycled", "200, the previous prompt's answer; failure counter 0",
     "consumed-recycled", "4"),
    ("the lease has ended", "200, right (recomputed)", "expired-recycled", "5"),
)  # fmt: skip
PUSH = (
    ("C1: decode gives up after it registered; the write lands in blocks with a new owner", ("row 16",)),
    ("C2: the write of some blocks fails to start and is not told; decode counts for ever",
     ("tests/unit/test_kv_receive.py::test_transfers_that_go_wrong",
      "tests/contract/test_transfer_nixl.py::test_memory_that_cannot_be_read_fails_the_whole_batch_and_a_new_connection_heals",
      "tests/integration/test_edges_ends.py::test_prefills_stream_ends_between_any_two_events")),
    ("C3: a partial prefix hit puts blocks into the wrong places",
     ("row 8", "tests/unit/test_handoff.py::test_any_order_of_descriptors_orders_each_page_into_its_own_slot")),
    ("L1: no loop tells whether the other side lives",
     ("row 17c", "row 18", "tests/integration/test_edges_calls.py::test_a_lease_is_renewed_while_its_pages_wait_for_a_slow_pull")),
    ("S2: one slow peer holds up the handshakes of all",
     ("tests/integration/test_edges_ends.py::test_pulls_that_hang_keep_nobody_else_waiting",
      "tests/contract/test_transfer_nixl_peers.py::test_a_stopped_peer_is_refused_at_connect_and_holds_up_nobody")),
    ("vllm#55470: a write is posted after its producer's request had ended",
     ("row 4", "row 5", "tests/unit/test_kv_receive_time.py::test_a_source_page_that_moves_on_after_its_data_was_read")),
)  # fmt: skip

HEAD = """# Faults of split serving, and what Genlock does

Written by `python -m bench.faults`; continuous integration holds it against the data in `bench/faults/` and checks that
every test named here exists. Each kind was reported in public for some engine; the links lead there, the words are ours,
and the reports are as they stood in September 2026. A repository's state moves on: read the thread before you judge it.

How to read a row: `row 4` is a row of `genlock selftest --row 4`, which runs the fault twice: with every check, when it
must end with a typed error and no wrong token while a healthy request on the same workers is right and every page comes
back; and without the row's checks, when the wrong answer must appear. `sim late_bytes` is a fault that `genlock sim` draws
by seed (`tests/sim/test_sim_slice.py`, `tests/integration/test_sim_swarm.py`). `without digest` is a control that the suite runs: with that check off, the wrong
thing happens (`tests/sim/test_sim_controls.py`, `tests/unit/test_kv_checks.py`). Where nothing can be switched off, the
column says why.
"""


def page(measured: Path = MEASURED) -> str:
    """The whole document."""
    record = controls.read(measured)
    parts = [HEAD, _recorded(record), _five(record), _push(), _peers(measured)]
    for title, faults in GROUPS:
        parts.append(f"## {title}\n\n" + _table(faults, record))
    parts += [_found(record), _fuzz(measured)]
    return "\n".join(parts)


def proof_text(proof: str) -> str:
    if proof.partition(" ")[0] in ("row", "sim", "without"):
        return f"`{proof}`"
    name, _, test = proof.partition("::")
    return f"[`{test}`](../{name})"


def control_text(fault: Fault | Found, record: controls.Record) -> str:
    """What happens without the check: for a row what was recorded, for the others what the suite asserts."""
    lines = []
    for proof in fault.control:
        kind, _, rest = proof.partition(" ")
        if kind == "row":
            off = rows()[rest].off
            lines.append(f"`{proof}` without {', '.join(off)}: {record.told(rest, off)}")
        else:
            lines.append(f"{proof_text(proof)}: a law breaks" if kind == "without" else proof_text(proof))
    return "<br>".join(lines) or (f"none: {fault.no_control}" if fault.no_control else "none")


def _recorded(record: controls.Record) -> str:
    if not record.rows:
        return "Results of rows with their checks off: none are recorded.\n"
    return (
        f"Results of rows with their checks off, as recorded on {record.date} with {' and '.join(record.models)}\n"
        "(`genlock selftest -o json > report.json`, then `python -m bench.faults --controls report.json`).\n"
    )


def _table(faults: Sequence[Fault], record: controls.Record) -> str:
    lines = ["| | fault | elsewhere | Genlock | shown by | without the check |", "|---|---|---|---|---|---|"]
    for fault in faults:
        seen = " ".join(address(source) for source in fault.sources)
        here = fault.here + (f" Not yet: {fault.not_yet}." if fault.not_yet else "")
        shown = "<br>".join(proof_text(proof) for proof in fault.shown)
        lines.append(
            f"| {fault.number} | {fault.title} | {fault.elsewhere} {seen} | {here} | {shown} | {control_text(fault, record)} |"
        )
    return "\n".join(lines) + "\n"


def _five(record: controls.Record) -> str:
    lines = [
        "## Five ways to a wrong 200",
        "",
        f"The five cases of {address('vllm#52234')} (reported there for vLLM 0.29 with a hybrid model on GPUs; our own",
        "measurement on 0.32 is below). Kind 1.",
        "",
        "| case | as reported | Genlock | row | without the checks |",
        "|---|---|---|---|---|",
    ]
    for title, reported, _, number in FIVE:
        told = {"1": "ABORTED/unknown_handoff", "2": "DATA_LOSS/page_out_of_bounds", "3": "ABORTED/unknown_handoff"}
        off = rows()[number].off
        lines.append(
            f"| {title} | {reported} | `{told.get(number, 'ABORTED/header_mismatch')}`, no token | `row {number}` "
            f"| {', '.join(off)}: {record.told(number, off)} |"
        )
    return "\n".join(lines) + "\n"


def _push() -> str:
    lines = [
        "## The push matrix",
        "",
        f"The rows of {address('vllm#48633')}, the inventory of push mode. Genlock has no push: decode pulls, only a pool's",
        "owner writes into it, and pages are named instead of counted. What is left of each row, and its tests. Kind 7.",
        "",
        "| row | the same on Genlock |",
        "|---|---|",
    ]
    lines += [f"| {title} | {', '.join(proof_text(proof) for proof in proofs)} |" for title, proofs in PUSH]
    return "\n".join(lines) + "\n"


def _load(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _outcomes(report: dict[str, Any] | None) -> list[Outcome]:
    rows_of = [] if report is None else report["outcomes"]
    return [Outcome(**{**row, "verdict": Verdict(row["verdict"])}) for row in rows_of]


SYSTEMS = ("vLLM P/D", "Genlock")


def _peers(measured: Path) -> str:
    ours, theirs = (_load(measured / f"{name}.json") for name in ("genlock", "vllm"))
    runs = [run for run in (theirs, ours) if run is not None]
    lines = [
        "## The same faults, side by side",
        "",
        "    bench/peers/install_vllm vllm-venv",
        "    genlock bench peers --vllm-python vllm-venv/bin/python --json",
        "",
        "Both serve SmolLM2-135M-Instruct; each prompt hides a marker of its own, so that another prompt's KV shows in the",
        "text. vLLM runs with NixlConnector (pull) and `kv_load_failure_policy=fail`; a reference is what prefill answered,",
        "kept or altered before decode gets it. No client of Genlock ever holds a reference: there the same thing is done",
        "to the messages between the two workers, to the pools or to the process, beside a healthy request.",
        "",
        *(f"Run of {run['date']}, {run['cores']} cores, no GPU: {_versions(run)}." for run in runs),
        "",
        "| case | vLLM P/D | Genlock |",
        "|---|---|---|",
    ]
    cells = {(s.case, s.system): s for s in summarise(_outcomes(theirs) + _outcomes(ours))}
    for case in CASES:
        text = []
        for system in SYSTEMS:
            cell = cells.get((case.name, system))
            text.append("not run" if cell is None else f"{cell.told}: {cell.verdict}")
        lines.append(f"| {case.title} | {text[0]} | {text[1]} |")
    return "\n".join(lines) + "\n"


def _versions(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in run["versions"].items())


def _found(record: controls.Record) -> str:
    lines = [
        "## Found here",
        "",
        "Faults of Genlock itself that simulator, chaos, fuzzers, reviews and measurements found, each with the test that would show",
        "it again. The last column: what the suite sees when the repair is undone.",
        "",
        "| fault | found by | what happened | what it is now | shown by | without the repair |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FOUND:
        shown = "<br>".join(proof_text(proof) for proof in fault.shown)
        told = control_text(fault, record)
        lines.append(f"| {fault.title} | {fault.by} | {fault.was} | {fault.now} | {shown} | {told} |")
    return "\n".join(lines) + "\n"


FOUND_BY_FUZZERS = """What they found is in the table above; besides, a status without a meaning from prefill was told as an internal error."""


def _fuzz(measured: Path) -> str:
    report = _load(measured / "fuzz.json")
    lines = [
        "## Hostile input",
        "",
        "The borders below are fuzzed: what comes in is refused with a typed error or is right, a healthy request beside it is",
        "right, and at the end every page, task and file is back. Continuous integration runs a slice of about 100,000 cases",
        "(`tests/fuzz/test_fuzz.py`); `python -m tests.fuzz --cases 1000000` runs more, and a case again by its number.",
        "",
        FOUND_BY_FUZZERS,
    ]
    if report is not None:
        findings = sum(len(layer["findings"]) for layer in report["layers"])
        lines += [
            "",
            f"A run with seed {report['seed']}: {report['cases']:,} cases in {report['seconds']} s, {findings} findings.",
            "",
            "| border | cases | most frequent outcomes |",
            "|---|---|---|",
        ]
        for layer in report["layers"]:
            top = ", ".join(f"{name} {count:,}" for name, count in list(layer["outcomes"].items())[:5])
            lines.append(f"| {layer['layer']} | {layer['cases']:,} | {top} |")
    return "\n".join(lines) + "\n"
