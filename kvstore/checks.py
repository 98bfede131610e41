"""Which checks run. Production always runs all of them: no flag, file or variable can reach this record.

The simulator and the fault table pass a record with one check off as a negative control: the wrong answer must
then appear, or the check proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Checks:
    """One field a check; see the module that reads it."""

    # handoff protocol (decode/handoff.py)
    handoff_id: bool = True
    exact_set: bool = True
    stream_end: bool = True
    # descriptor and receipt (kvstore/receipt.py)
    bounds: bool = True
    incarnation: bool = True
    layout: bool = True
    header: bool = True
    prefix_key: bool = True
    digest: bool = True
    source_tag: bool = True
    # every read and write (kvstore/guard.py, kernels)
    entry: bool = True
    kernel: bool = True
    exit: bool = True
    rows: bool = True
    write: bool = True
    # life cycle (kvstore/lifecycle.py)
    quarantine: bool = True
    tag_bump: bool = True
    pins: bool = True

    def without(self, *names: str) -> Checks:
        """The same record with the named checks off. Raises TypeError for an unknown name."""
        return replace(self, **dict.fromkeys(names, False))


ALL_CHECKS = Checks()


def check_names() -> tuple[str, ...]:
    """All checks, in the order in which a page meets them."""
    return tuple(f.name for f in fields(Checks))
