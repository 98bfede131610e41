"""One line of what `genlock doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL, SKIP = "ok", "warning", "failed", "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is there where the result is not ok."""

    check: str
    result: str
    detail: str
    fix: str = ""
