"""Ways to be careless with labels and ids, each a hole in the product (or, where the product's code is a shell, in what
the simulator plays of it). With one open a law must break; see `test_sim_labels.py`.

`python -m tests.sim.label_holes` prints the table of docs/simulator.md: seeds until the first violation.
"""

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

from _pytest.monkeypatch import MonkeyPatch

from cluster.gateway.roll import Entry, Roll
from decode.core import DecodeCore
from kvstore.errors import Cancelled
from model.ticket import Ticket
from prefill.core import PrefillCore
from sim.callers import Callers
from sim.controls import ANY_LAW, AT_THE_CALLER, CONTROL_SEEDS
from sim.faults import Faults
from sim.runner import run
from sim.world import make_kit

ABORTED = Cancelled("aborted_by_caller", "the caller aborted this request")


def tenant_ignored(patch: MonkeyPatch) -> None:
    patch.setattr(Roll, "named", lambda self, tenant, label: tuple(e for e in self if e.key[1] == label))


def label_ignored(patch: MonkeyPatch) -> None:
    patch.setattr(Roll, "named", lambda self, tenant, label: tuple(e for e in self if e.key[0] == tenant))


def first_found(patch: MonkeyPatch) -> None:
    named = Roll.named
    patch.setattr(Roll, "named", lambda self, tenant, label: named(self, tenant, label)[:1])


def kept_by_label(patch: MonkeyPatch) -> None:
    """A table from label to request: a second one takes the first one's place, and who ends empties the place."""
    named, leave = Roll.named, Roll.leave

    def gone(self: Roll, entry: Entry) -> None:
        leave(self, entry)
        for other in named(self, *entry.key):
            other.key = (other.key[0], "forgotten")

    patch.setattr(Roll, "named", lambda self, tenant, label: named(self, tenant, label)[-1:])
    patch.setattr(Roll, "leave", gone)


def empty_label_names(patch: MonkeyPatch) -> None:
    patch.setattr(Roll, "abort", lambda self, *key: sum(e.stop(ABORTED) for e in self.named(*key)))


def stopped_again(patch: MonkeyPatch) -> None:
    stop = Entry.stop

    def again(self: Entry, error: Cancelled) -> bool:
        self.stopped_by = None
        return stop(self, error)

    patch.setattr(Entry, "stop", again)


def told_and_not_stopped(patch: MonkeyPatch) -> None:
    patch.setattr(Entry, "stop", lambda self, error: self.stopped_by is None)


def never_off_the_roll(patch: MonkeyPatch) -> None:
    patch.setattr(Roll, "leave", lambda self, entry: None)


def decode_not_told(patch: MonkeyPatch) -> None:
    patch.setattr(Callers, "_cancel", lambda self, request: None)


def one_id_for_all_answers(patch: MonkeyPatch) -> None:
    patch.setattr(Callers, "_again", lambda self, ticket: ticket)


def id_kept_by_the_next_attempt(patch: MonkeyPatch) -> None:
    preempt = DecodeCore._preempt

    def kept(self, req, now_ms, outcomes):
        ticket_id = req.ticket.ticket_id
        preempt(self, req, now_ms, outcomes)
        req.ticket = replace(req.ticket, ticket_id=ticket_id)

    patch.setattr(DecodeCore, "_preempt", kept)


def handoff_named_by_its_ticket(patch: MonkeyPatch, name: Callable[[Ticket], bytes]) -> None:
    submit = PrefillCore.submit

    def named(self, ticket, now_ms):
        drawn, self._random_bytes = self._random_bytes, lambda count: name(ticket)
        try:
            return submit(self, ticket, now_ms)
        finally:
            self._random_bytes = drawn

    patch.setattr(PrefillCore, "submit", named)


def handoff_takes_its_tickets_id(patch: MonkeyPatch) -> None:
    handoff_named_by_its_ticket(patch, lambda ticket: ticket.ticket_id)


def ids_of_labels(patch: MonkeyPatch) -> None:
    """The classic one: every id is made of what the client says."""
    send = Callers.send

    def named(self, wish, ticket, *rest):
        made = hashlib.blake2b(f"{ticket.tenant} {wish.label}".encode(), digest_size=16).digest()
        send(self, wish, replace(ticket, ticket_id=made), *rest)

    patch.setattr(Callers, "send", named)
    patch.setattr(Callers, "_again", lambda self, ticket: ticket)
    id_kept_by_the_next_attempt(patch)
    handoff_named_by_its_ticket(patch, lambda ticket: ticket.ticket_id[::-1])


Hole = Callable[[MonkeyPatch], None]
# Judged by any law, in seeds as they are drawn.
HOLES: tuple[Hole, ...] = (
    tenant_ignored, label_ignored, first_found, kept_by_label, empty_label_names, stopped_again, told_and_not_stopped,
    never_off_the_roll, decode_not_told, one_id_for_all_answers, id_kept_by_the_next_attempt,
    handoff_takes_its_tickets_id, ids_of_labels,
)  # fmt: skip
# Judged by wrong tokens alone: here labels meet often, and so do their completions.
CROSSED = Faults(label_shared=0.9, completion_crossed=0.5)


@contextmanager
def opened(hole: Hole):
    with MonkeyPatch.context() as patch:
        hole(patch)
        yield


def tell(hole: Hole, judged: str, laws: tuple[str, ...], faults: Faults | None) -> None:
    kit = make_kit()
    with opened(hole):
        runs = (run(seed, kit=kit, laws=laws, faults=faults) for seed in range(CONTROL_SEEDS))
        found = next(((r.seed + 1, r.violations[0].law) for r in runs if r.violations), ("NEVER", ""))
    print(f"| {hole.__name__.replace('_', ' ')} | {judged} | {found[0]} | `{found[1]}` |", flush=True)


if __name__ == "__main__":
    for each in HOLES:
        tell(each, "any law", ANY_LAW, None)
    tell(ids_of_labels, "caller", AT_THE_CALLER, CROSSED)
