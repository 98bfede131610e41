"""What must hold in every run. A broken law ends the run; the first one is the seed's verdict.

Each law judges by the simulator's own knowledge (the book of every pool, the tokens' oracle), never by a tag table or
a digest that a check under test also uses. Stage laws (`forged_descriptor`, `stale_row_admitted` and so on) say that
each check does its own work even where a later one would still save the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import GenlockError

LAWS: dict[str, str] = {
    "wrong_token": "a token that left differs from the oracle's",
    "wrong_length": "an answer that ended well has fewer tokens than the oracle's, or an answer has more",
    "token_after_end": "a token left after the request had ended",
    "ended_twice": "a request ended twice",
    "overdue": "a request, a handoff, a copy or a lease went on after its due time or for nobody, or had none",
    "never_ended": "a request did not end after the faults had stopped",
    "not_in_service": "a request that was sent after all faults had ended was not answered",
    "failed_without_fault": "a request failed although nothing went wrong",
    "page_lost": "free + open + sealed + quarantined differs from the pool",
    "two_owners": "a page is claimed twice or belongs to somebody else than its claimant",
    "counts_differ": "shares, leases or holds of a page differ from who counts on it",
    "tag_repeats": "a slot was handed out under a tag that it had before",
    "handed_out_busy": "a page was handed out while a copy or a step may still write it",
    "pinned_page_retired": "a page was retired while somebody counted on it",
    "sealed_wrong_bytes": "prefill promised a page that does not hold the request's KV",
    "forged_descriptor": "a copy began for a descriptor that the peer never made for this place",
    "adopted_stale": "a page was adopted although its source had moved on before it landed",
    "adopted_wrong_bytes": "a page was adopted that does not hold the request's KV",
    "stale_row_admitted": "a step began for a row with a page that had moved on",
    "unwritable_row_admitted": "a step began for a row that does not own the pages it writes",
    "kernel_read_stale": "a kernel read a page that had moved on",
    "kernel_wrote_foreign": "a kernel wrote to a page that is not the row's own",
    "published_stale": "a result left although a page of its row had moved on",
    "blames_the_caller": "a request without a mistake of its own ended with InvalidInput",
    "waits_for_nobody": "a request waits for a stream that has ended",
    "routed_to_cordoned": "a gateway sent a request to a worker that it knew to be cordoned, draining or gone",
    "routed_across_layouts": "a gateway paired workers that it knew to have different page layouts",
    "routed_unevenly": "a gateway passed over a worker with fewer of its own tokens outstanding",
    "claims_left": "a gateway counts tokens for requests that have ended, or has them on its roll",
    "id_repeats": "two attempts or handoffs had one server-made id",
    "abort_missed": "a request that an Abort named was not ended by it",
    "aborted_unnamed": "a request was aborted that no Abort named: of another tenant, label or gateway",
    "abort_miscounted": "an Abort told another number than that of the requests which it stopped",
    "drain_lost_request": "a drain that told the gateways and had enough time ended a request",
    "drained_with_lease": "a worker counted as drained while its pages were promised or in use",
    "drain_overdue": "a drain was not over at its deadline",
    "too_many_workers": "more workers of a role ran than were wanted, and one",
    "restarted_too_soon": "a worker was started again before its back-off was over",
    "fleet_not_restored": "the wanted workers were not all ready after the faults had stopped",
    "incarnation_repeats": "a worker began a life under an incarnation that a pool had before",
    "refusal_changed_state": "a refused call changed a page",
    "pages_not_back": "pages were missing when everything had ended",
    "crash": "an exception that is no verdict escaped",
}


@dataclass(frozen=True)
class Violation:
    law: str
    detail: str
    at_ms: int
    event: int

    def __str__(self) -> str:
        return f"{self.law} at {self.at_ms} ms (event {self.event}): {self.detail}"


class Broken(Exception):
    """Ends a run at once: a law is broken and what follows means nothing."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law
        self.detail = detail


class Laws:
    """Which laws count in this run. All do, unless a control asks what reaches the caller."""

    def __init__(self, enforced: frozenset[str]) -> None:
        unknown = sorted(enforced - LAWS.keys())
        if unknown:
            raise GenlockError("unknown_law", f"there is no law {unknown[0]!r}")
        self._enforced = enforced

    def enforces(self, law: str) -> bool:
        return law in self._enforced

    def broken(self, law: str, detail: str) -> None:
        assert law in LAWS, law
        if law in self._enforced:
            raise Broken(law, detail)

    def require(self, holds: bool, law: str, detail: str) -> None:
        if not holds:
            self.broken(law, detail)
