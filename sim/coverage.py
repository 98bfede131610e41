"""What a swarm reached: every slot state with every event, every check's way to say no. What it did not, by name."""

from __future__ import annotations

from collections import Counter

from kvstore.lifecycle import SlotEvent, SlotState
from sim.faults import site_names
from sim.watch import Cell

# The causes by which each check shows that it refused something; a life-cycle check shows in a cell instead.
REJECTS: dict[str, tuple[str, ...]] = {
    "handoff_id": ("foreign_ticket", "unknown_handoff"),
    "exact_set": ("duplicate_page", "pages_missing"),
    "stream_end": ("handoff_cut",),
    "bounds": ("page_out_of_bounds",),
    "incarnation": ("stale_incarnation",),
    "layout": ("layout_mismatch", "descriptor_layout", "descriptor_length"),
    "header": ("page_misplaced", "header_mismatch"),
    "prefix_key": ("foreign_prefix_key",),
    "digest": ("digest_mismatch",),
    "source_tag": ("source_moved_on",),
    "entry": ("stale_at_entry",),
    "kernel": ("stale_in_kernel",),
    "exit": ("stale_at_exit",),
    "rows": ("rows_disagree",),
    "write": ("stale_write",),
    "quarantine": ("not_quiet",),
    "tag_bump": (),
    "pins": ("page_pinned",),
}

# Cells that no caller can bring about, each with the reason.
IMPOSSIBLE: dict[tuple[SlotState, SlotEvent], str] = {
    **{
        (state, SlotEvent.ALLOCATE): "pages are handed out from the free list alone"
        for state in (SlotState.OPEN, SlotState.SEALED, SlotState.QUARANTINED)
    },
}


# Where in a handoff its lease can end.
GAPS = ("before the pull", "during the copy", "between data and tags", "before the release")

# Of the states of a handoff as decode sees it, FAILED is left out: what comes after it finds the attempt closed.
_HANDOFF = ("called", "accepted", "completed")
_HANDOFF_EVENTS = ("accepted", "page", "completed", "end", "error")
# A request at decode, by how far it has come; tokens come only after the handoff.
_ENDS = ("cancelled", "deadline_exceeded", "failed")
_REQUEST: dict[str, tuple[str, ...]] = {
    "waiting": ("assigned", *_ENDS), "handoff": _ENDS, "joined": ("token", "finished", "preempted", *_ENDS)
}  # fmt: skip
# What a label meant at a gateway when it was asked, retried or aborted. `elsewhere`: the tenant's own, at another
# gateway; `another's`: another tenant's alone.
_LABEL: dict[str, tuple[str, ...]] = {
    "unknown": ("asked", "aborted"),
    "another's": ("asked", "aborted"),
    **dict.fromkeys(("empty", "live", "elsewhere", "ended"), ("asked", "retried", "aborted")),
}
# How far a request had come when an Abort named it.
_ABORTED = ("on its way", "waiting", "handoff", "joined", "answered", "stopping", "of several answers")
# A worker as the controller sees it at the beginning of a turn, and what it hears of it then.
_HEARD = ("Told", "Silent", "Ended", "DrainAsked")
_WORKER: dict[str, tuple[str, ...]] = {
    "unknown": ("Found",),
    "starting": ("Started", "StartFailed", *_HEARD),
    "ready": _HEARD,
    "degraded": _HEARD,
    "draining": _HEARD,
    "stopped": ("DrainAsked",),
}


def named_cells() -> list[str]:
    """Cells beside those of the slots: states of handoffs, requests and workers with what can happen to them."""
    made = [f"lease ends {gap}" for gap in GAPS]
    made += [f"handoff {state} x {event}" for state in _HANDOFF for event in _HANDOFF_EVENTS]
    made += [f"request {state} x {event}" for state, events in _REQUEST.items() for event in events]
    made += [f"label {state} x {event}" for state, events in _LABEL.items() for event in events]
    made += [f"request {state} x aborted" for state in _ABORTED] + ["request stopping x ended before"]
    return made + [f"worker {state} x {event}" for state, events in _WORKER.items() for event in events]


def met_lines(met: Counter[str]) -> list[str]:
    """For each state of a handoff, a request, a label and a worker, and for leases: how often each event met it."""
    lines: dict[str, list[str]] = {}
    for cell in named_cells():
        state, cross, event = cell.partition(" x ")
        if not cross:
            state, event = "lease ends", cell.removeprefix("lease ends ")
        lines.setdefault(state, []).append(f"{event} {met[cell]}")
    return [f"{state}: {', '.join(events)}" for state, events in lines.items()]


def rejects(reasons: Counter[str]) -> dict[str, dict[str, int]]:
    """For each check that refuses by a cause: how often it did."""
    return {check: {why: reasons[why] for why in causes} for check, causes in REJECTS.items() if causes}


def unreached(cells: Counter[Cell], reasons: Counter[str], faults: Counter[str], met: Counter[str]) -> list[str]:
    """Names of what was never reached: `free x seal`, `digest: digest_mismatch`, `handoff called x end`,
    `fault torn_page`."""
    seen = {(state, event) for state, event, _ in cells}
    missing = [
        f"{state} x {event}"
        for state in SlotState
        for event in SlotEvent
        if (state, event) not in seen and (state, event) not in IMPOSSIBLE
    ]
    missing += [f"{check}: {why}" for check, reasons_of in REJECTS.items() for why in reasons_of if not reasons[why]]
    missing += [cell for cell in named_cells() if not met[cell]]
    return missing + [f"fault {site}" for site in site_names() if not faults[site]]


def table(cells: Counter[Cell]) -> list[str]:
    """One line a state: for each event `allowed/refused`."""
    head = f"{'':12}" + "".join(f"{event:>16}" for event in SlotEvent)
    lines = [head]
    for state in SlotState:
        row = "".join(f"{_cell(cells, state, event):>16}" for event in SlotEvent)
        lines.append(f"{state:12}{row}")
    return lines


def _cell(cells: Counter[Cell], state: SlotState, event: SlotEvent) -> str:
    allowed, refused = cells[state, event, True], cells[state, event, False]
    return f"{allowed}/{refused}" if allowed or refused else "-"
