"""Which pairs of workers owe an exchange of a page, kept from one look at the fleet to the next. Pure.

There are as many pairs as decode times prefill workers, and nearly none of them changes between two looks: only those
of workers that changed are compared anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cluster.gateway.fleet import Fleet, WorkerRecord, layout_of
from cluster.roles import Role
from cluster.router import layouts_fit

Records = tuple[WorkerRecord, WorkerRecord]


class _Facts(NamedTuple):
    """What of a worker decides about its pairs. `passed`: of a decode worker."""

    role: Role
    incarnation: int
    layout: str
    passed: Mapping[str, int] | None


class Pairs:
    """`compared`: pairs that were looked at, since the start."""

    def __init__(self) -> None:
        self.compared = 0
        self._facts: dict[str, _Facts] = {}
        self._fleet = Fleet()
        # By decode worker, in the order in which they came to owe it.
        self._owed: dict[str, dict[str, None]] = {}

    def look(self, fleet: Fleet) -> None:
        """Takes what is known now."""
        self._fleet = fleet
        facts = {record.worker_id: _facts(record) for record in fleet.ready()}
        before, self._facts = self._facts, facts
        for gone in before.keys() - facts.keys():
            self._forget(gone)
        changed = [name for name, fact in facts.items() if not _same(before.get(name), fact)]
        decoders = [name for name, fact in facts.items() if fact.role is Role.DECODE]
        prefillers = [name for name, fact in facts.items() if fact.role is Role.PREFILL]
        anew = set(changed)
        for name in changed:
            if facts[name].role is Role.DECODE:
                self._owed.pop(name, None)
                for prefill in prefillers:
                    self._judge(name, prefill)
            else:
                for decode in decoders:
                    if decode not in anew:
                        self._judge(decode, name)

    def owed(self) -> Iterator[Records]:
        """Pairs (decode, prefill) that are ready, have one layout and still owe an exchange for the present life of the
        prefill worker's pool. Not to be kept over the next look."""
        workers = self._fleet.workers
        return ((workers[d], workers[p]) for d, prefillers in self._owed.items() for p in prefillers)

    def owes(self, decode: str, prefill: str, incarnation: int) -> bool:
        """Whether that pair does, for that life."""
        return prefill in self._owed.get(decode, ()) and self._facts[prefill].incarnation == incarnation

    def _judge(self, decode: str, prefill: str) -> None:
        self.compared += 1
        ours, theirs = self._facts[decode], self._facts[prefill]
        alike = layouts_fit(ours.layout, theirs.layout)
        if alike and ours.passed is not None and ours.passed.get(prefill) != theirs.incarnation:
            self._owed.setdefault(decode, {})[prefill] = None
            return
        kept = self._owed.get(decode)
        if kept is not None:
            kept.pop(prefill, None)
            if not kept:
                del self._owed[decode]

    def _forget(self, name: str) -> None:
        self._owed.pop(name, None)
        for decode in [key for key, prefillers in self._owed.items() if name in prefillers]:
            del self._owed[decode][name]
            if not self._owed[decode]:
                del self._owed[decode]


def unproved(fleet: Fleet) -> list[Records]:
    """All pairs that owe an exchange, compared from nothing."""
    pairs = Pairs()
    pairs.look(fleet)
    return list(pairs.owed())


def _facts(record: WorkerRecord) -> _Facts:
    assert record.status is not None, "who is ready has answered"
    return _Facts(record.role, record.status.incarnation, layout_of(record), record.passed)


def _same(before: _Facts | None, now: _Facts) -> bool:
    # The mapping is kept while it says the same.
    return before is not None and before.passed is now.passed and before[:3] == now[:3]
