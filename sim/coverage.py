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


def unreached(cells: Counter[Cell], reasons: Counter[str], faults: Counter[str]) -> list[str]:
    """Names of what was never reached: `free x seal`, `digest: digest_mismatch`, `fault torn_page`."""
    seen = {(state, event) for state, event, _ in cells}
    missing = [
        f"{state} x {event}"
        for state in SlotState
        for event in SlotEvent
        if (state, event) not in seen and (state, event) not in IMPOSSIBLE
    ]
    missing += [f"{check}: {why}" for check, reasons_of in REJECTS.items() for why in reasons_of if not reasons[why]]
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
