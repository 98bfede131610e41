"""What happened when rows of the fault table ran with their checks off, as `genlock selftest` reported it. Pure but for
the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidInput

FILE = "controls.json"


@dataclass(frozen=True)
class Control:
    """One row with these checks off. `noticed`: by model, whether the wrong answer appeared, so that the check is what
    keeps it away."""

    off: tuple[str, ...]
    noticed: Mapping[str, bool]


@dataclass(frozen=True)
class Record:
    """Results of the date; by the row's number."""

    date: str = ""
    rows: Mapping[str, Control] = field(default_factory=dict)

    def told(self, number: str, off: tuple[str, ...]) -> str:
        """What the page says of a row's control. A result with other checks off is none."""
        found = self.rows.get(number)
        if found is None or found.off != off or not found.noticed:
            return "no result recorded"
        missed = [model for model, noticed in found.noticed.items() if not noticed]
        return f"NOT NOTICED with {', '.join(missed)}" if missed else "wrong answer"

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({model for control in self.rows.values() for model in control.noticed}))


def read(folder: Path) -> Record:
    """Of a folder of measurements; empty where nothing is recorded."""
    path = folder / FILE
    if not path.exists():
        return Record()
    kept = json.loads(path.read_text("utf-8"))
    rows = {number: Control(tuple(row["off"]), row["noticed"]) for number, row in kept["rows"].items()}
    return Record(kept["date"], rows)


def record_of(report: Any, date: str) -> Record:
    """From what `genlock selftest -o json` printed. Raises InvalidInput if it is something else."""
    rows: dict[str, Control] = {}
    try:
        for row in report["rows"]:
            number, off = str(row["number"]), tuple(map(str, row["checks_off"]))
            before = rows[number].noticed if number in rows else {}
            rows[number] = Control(off, {**before, str(row["model"]): row["control_wrong"] is True})
    except (KeyError, TypeError) as error:
        raise InvalidInput("bad_report", f"not a report of `genlock selftest -o json`: {error!r}") from error
    return Record(date, rows)


def text_of(record: Record) -> str:
    """The file's content."""
    rows = {number: {"off": row.off, "noticed": dict(row.noticed)} for number, row in record.rows.items()}
    return json.dumps({"date": record.date, "command": "genlock selftest -o json", "rows": rows}, indent=1) + "\n"
