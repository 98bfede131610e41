"""Each law broken on purpose: when a world is ready for it, and what is done to it then."""

from dataclasses import replace

import pytest

from cluster.control.state import Kill, Start, Stop
from cluster.router import route_many
from kvstore.errors import GenlockError, InvalidInput, NoCapacity
from kvstore.ids import PageRef, Tag
from kvstore.lifecycle import SlotEvent, SlotState
from kvstore.step import PageRun
from sim.control_side import POLICY
from sim.mischief import HOG
from sim.worker import Work
from tests.sim.sabotage_callers import (
    abort_one_answer,
    abort_to_nobody,
    abort_unasked,
    abort_with_another_count,
    asked_that_runs,
    at_decode,
    give_up_in_secret,
    one_ticket_id,
    several_answers_run,
    stay_on_the_roll,
)


def running(w):
    return any(d.core._requests and any(r.joined for r in d.core._requests.values()) for d in w.decodes)


def a_request(w):
    return next((d, r) for d in w.decodes for r in d.core._requests.values() if r.joined)


def cached(w):
    return [(p, ref) for p in w.prefills for _, ref in p.core.index.oldest() if p.guard.is_live(ref)]


def at_once(w):
    return bool(w.requests) and running(w)


def change_slot(guard, page_id, **changes):
    guard._book._slots[page_id] = guard._book._slots[page_id]._replace(**changes)


def token_after_end(w):
    d, r = a_request(w)
    request = d.requests[r.request_no]
    request.ended = True


def end_twice(w):
    d, r = a_request(w)
    request = d.requests[r.request_no]
    w.on_end(request, NoCapacity("full"))
    w.on_end(request, NoCapacity("full"))


def tag_repeats(w):
    d = w.decodes[0]
    d.guard._last = [1 << 40] * d.guard.slots


def handed_out_busy(w):
    for worker in w.workers:
        worker.guard.busy = lambda page_id: True


def wrong_bytes_at_prefill(w):
    for p in w.prefills:
        p.compute.kv_of_page = lambda slot, rows: b"?"


def wrong_bytes_at_decode(w):
    for d in w.decodes:
        d.compute.kv_of_page = lambda slot, rows: b"?"


def never_ends(w):
    for d in w.decodes:
        d.turn = lambda: None
        d.tick = lambda: None


def expire_no_request(w):
    for d in w.decodes:
        d.turn = lambda: None
        d.core.expire = lambda now: []
    for request in w.requests:
        request.due_ms = w.heap.now_ms


def expire_no_lease(w):
    for p in w.prefills:
        p.core.leases.expired = lambda now: ()
    w.net.release = w.net.hang_up = lambda *told: None


def pull_for_ever(w):
    for d in w.decodes:
        later = d.later
        d.later = lambda ms, name, call, *args, later=later: name == "pulled" or later(ms, name, call, *args)


def quiet_for_long(w):
    copy = next(c for d in w.decodes for c in d.copies)
    copy.finished, copy.quiet_ms, copy.pull.transfer.quiesced = True, -1000, lambda: True


def handoff_without_request(w):
    d = next(d for d in w.decodes if d.attempts)
    number, attempt = next(iter(d.attempts.items()))
    d.attempts[number + 1000] = attempt


def lease_of_nobody(w):
    w.prefills[0].core.leases.grant(b"nobody", w.prefills[0].now)


def leak(w):
    w.decodes[0].guard.allocate(HOG, 1)  # and nobody gives it back


def lose_page(w):
    w.decodes[0].guard._book._counts[SlotState.FREE] -= 1


def steal_at(moment):
    """Takes the first page of the first row just before a stage, behind the guard's back."""

    def sabotage(w):
        for worker in w.decodes:
            steps, guard = worker.steps, worker.guard
            inner = getattr(steps, moment)

            def stolen(subject, *rest, inner=inner, guard=guard):
                plan = getattr(subject, "plan", subject)
                row = plan.rows[0]
                if guard.is_live(row.pages.refs[0]):
                    # The book moves on; the live tags that the checks compare do not.
                    book = guard._book
                    book._on_tag = lambda page_id, tag: None
                    guard.condemn((row.pages.refs[0],))
                return inner(subject, *rest)

            setattr(steps, moment, stolen)

    return sabotage


def own_nothing(w):
    for d in w.decodes:
        d.steps._writable = lambda ref, row: False


def write_foreign(w):
    for d in w.decodes:
        judge = d.steps._on_write

        def on_write(*seen, steps=d.steps, judge=judge):
            steps._writable = lambda ref, row: False
            judge(*seen)

        d.steps._on_write = on_write


def forged(w):
    for d in w.decodes:
        begin = d.receiver.begin

        def lie(peer, orders, owner, expected, begin=begin):
            pull = begin(peer, orders, owner, expected)
            for order in orders:
                object.__setattr__(order.desc, "ref", PageRef(0, Tag(1, 1)))
            return pull

        d.receiver.begin = lie


def source_gone(w):
    ended = w.copies.ended

    def gone(transfer):
        ended(transfer)
        copy = w.copies.of(transfer)
        if copy is not None:
            copy.source_live = False

    w.fabric._ended = gone


def pins_gone(w):
    p = w.prefills[0]
    guard = p.guard
    (ref,) = guard.allocate(5, 1)
    change_slot(guard, ref.page_id, shares=1)
    guard.checks = guard.checks.without("pins")
    guard._book.checks = guard.checks
    guard.retire((ref,), 5)


def refusal(w):
    guard = w.decodes[0].guard
    (ref,) = guard.allocate(5, 1)

    def half_done():
        change_slot(guard, ref.page_id, shares=3)
        raise GenlockError("half_done")

    with pytest.raises(GenlockError):
        guard._seen(SlotEvent.SHARE, (ref,), half_done)


def blame(w):
    d, r = a_request(w)
    w.on_end(d.requests[r.request_no], InvalidInput("our_mistake"))


def fail_calmly(w):
    d, r = a_request(w)
    w.on_end(d.requests[r.request_no], GenlockError("no_reason"))


def hang_up_quietly(w):
    for d in w.decodes:
        for attempt in d.attempts.values():
            attempt.rules.on_end = lambda error: None
            attempt.on_end(None)


def wrong_token(w):
    d, r = a_request(w)
    d.requests[r.request_no].oracle = type("Liar", (), {"answer": lambda self, index: -7})()


def end_all(w, cut):
    """Whether an answer is over after its first token is asked of `cut(sampling)`."""
    for d in w.decodes:
        emit = d.core._emit

        def emitted(req, token, d=d, emit=emit):
            kept = req.ticket
            req.ticket = replace(kept, sampling=cut(kept.sampling) if req.generated else kept.sampling)
            outcomes = emit(req, token)
            req.ticket = replace(req.ticket, sampling=kept.sampling)
            return outcomes

        d.core._emit = emitted


def too_short(w):
    end_all(w, lambda sampling: replace(sampling, max_tokens=max(1, sampling.max_tokens - 1)))


def too_long(w):
    end_all(w, lambda sampling: replace(sampling, max_tokens=sampling.max_tokens + 1))


def deaf_to_ends(w):
    end_all(w, lambda sampling: replace(sampling, ignore_eos=True, stop_token_ids=()))


def too_few_before_the_end(w):
    end_all(w, lambda sampling: replace(sampling, min_tokens=0))


def two_owners(w):
    d, r = a_request(w)
    change_slot(d.guard, r.pages.refs[0].page_id, owner=1 << 30)


def page_of_nobody(w):
    w.decodes[0].guard.allocate(1 << 30, 1)


def page_twice(w):
    _, r = a_request(w)
    r.pages = PageRun((*r.pages.refs, r.pages.refs[0]))


def miscount(w):
    counts = w.decodes[0].guard._book._counts
    counts[SlotState.OPEN] -= 1
    counts[SlotState.SEALED] += 1


def counts_differ(w):
    prefill, ref = cached(w)[0]
    change_slot(prefill.guard, ref.page_id, leases=7)


def hold_for_nobody(w):
    d, r = a_request(w)
    change_slot(d.guard, r.pages.refs[0].page_id, holds=1)


def copying(w):
    return any(not c.finished for d in w.decodes for c in d.copies)


def forget_hold(w):
    d = next(d for d in w.decodes if d.copies)
    change_slot(d.guard, d.copies[0].pull.orders[0].local.page_id, holds=0)


def share_at_decode(w):
    d, r = a_request(w)
    change_slot(d.guard, r.pages.refs[0].page_id, shares=1)


def lease_at_decode(w):
    d, r = a_request(w)
    change_slot(d.guard, r.pages.refs[0].page_id, leases=1)


def hold_at_prefill(w):
    prefill, ref = cached(w)[0]
    change_slot(prefill.guard, ref.page_id, holds=1)


def crash(w):
    raise ZeroDivisionError


def forget_cordons(w):
    """Gateways read the list and go on with the fleet that they had."""
    for gateway in w.gateways:
        take = gateway._take_list

        def keep(listed, gateway=gateway, take=take):
            fleet = gateway.fleet
            take(listed)
            gateway.fleet = fleet

        gateway._take_list = keep
    for worker in w.decodes:
        w.list.cordon(worker.name, True)


def cross_layouts(w):
    gateway = w.gateways[0]
    views = gateway.fleet.view({})
    [chosen] = route_many(views, 1, 1)
    gateway._judge(views, [replace(chosen, prefill=replace(chosen.prefill, layout_fingerprint="another"))])


def count_nothing(w):
    for gateway in w.gateways:
        claim = gateway.ledger.claim
        gateway.ledger.claim = lambda worker_id, tokens, claim=claim: claim(worker_id, 0)


def forget_claim(w):
    w.gateways[0].ledger.claim("decode-0", 5)


def refuse_probes(w):
    def routes(tokens, count, inner):
        if w._probed:
            raise NoCapacity("tired")
        return inner(tokens, count)

    gateway = w.gateways[0]
    inner = gateway.routes
    gateway.routes = lambda tokens, count: routes(tokens, count, inner)


def drain_in_haste(w):
    """The controller waits for nobody and hears that nobody is busy."""
    w.controller.state = replace(w.controller.state, policy=replace(POLICY, open_ms=0))
    for worker in w.workers:
        worker.told_work = lambda: Work(0, 0)
    w.controller.restart(a_request(w)[0])


def count_leases_as_drained(w):
    for worker in w.prefills:
        w.controller._judge_drained(worker)


def stop_nobody(w):
    perform = w.controller._perform
    w.controller._perform = lambda action: None if isinstance(action, Stop | Kill) else perform(action)
    w.controller.drain_short(w.decodes[0])


def too_many(w):
    for index in (7, 8, 9):
        w.bring_up(f"decode-{index}")
    w.mischief._crash(w.decodes[0])


def no_back_off(w):
    w.controller._count = lambda seen: None
    w.controller._failed["decode-0"] = 4
    w.controller._failed_ms["decode-0"] = w.heap.now_ms
    w.mischief._crash(w.decodes[0])


def start_nobody(w):
    perform = w.controller._perform
    w.controller._perform = lambda action: None if isinstance(action, Start) else perform(action)
    w.mischief._crash(w.prefills[0])


def same_incarnation(w):
    drawn = w.prefills[0].guard.incarnation
    w.dice.stream("incarnations").randbytes = lambda count: (drawn << 1).to_bytes(count, "little")
    w.mischief._crash(w.prefills[0])


def leased(w):
    return any(p.guard.book_slot(i).leases for p in w.prefills for i in range(p.guard.slots))


def idle(w):
    """Every request has ended; what follows is of nobody's making."""
    return bool(w.requests) and not w.callers.left and all(r.ended for r in w.requests)


SABOTAGE = {
    "routed_to_cordoned": (lambda w: True, forget_cordons),
    "routed_across_layouts": (lambda w: True, cross_layouts),
    "routed_unevenly": (lambda w: True, count_nothing),
    "claims_left": (idle, forget_claim),
    "id_repeats": (lambda w: True, one_ticket_id),
    "abort_missed": (asked_that_runs, abort_to_nobody),
    "aborted_unnamed": (asked_that_runs, abort_unasked),
    "abort_miscounted": (asked_that_runs, abort_with_another_count),
    "not_in_service": (lambda w: True, refuse_probes),
    "drain_lost_request": (running, drain_in_haste),
    "drained_with_lease": (leased, count_leases_as_drained),
    "drain_overdue": (lambda w: True, stop_nobody),
    "too_many_workers": (idle, too_many),
    "restarted_too_soon": (idle, no_back_off),
    "fleet_not_restored": (idle, start_nobody),
    "incarnation_repeats": (idle, same_incarnation),
    "wrong_token": (running, wrong_token),
    "wrong_length": (lambda w: True, too_short),
    "token_after_end": (running, token_after_end),
    "ended_twice": (running, end_twice),
    "never_ended": (at_once, never_ends),
    "overdue": (at_once, expire_no_request),
    "failed_without_fault": (running, fail_calmly),
    "blames_the_caller": (running, blame),
    "page_lost": (at_once, lose_page),
    "two_owners": (running, two_owners),
    "counts_differ": (cached, counts_differ),
    "tag_repeats": (lambda w: True, tag_repeats),
    "handed_out_busy": (lambda w: True, handed_out_busy),
    "pinned_page_retired": (lambda w: True, pins_gone),
    "sealed_wrong_bytes": (lambda w: True, wrong_bytes_at_prefill),
    "forged_descriptor": (lambda w: True, forged),
    "adopted_stale": (lambda w: True, source_gone),
    "adopted_wrong_bytes": (lambda w: True, wrong_bytes_at_decode),
    "stale_row_admitted": (lambda w: True, steal_at("_judge_entry")),
    "unwritable_row_admitted": (lambda w: True, own_nothing),
    "kernel_read_stale": (lambda w: True, steal_at("_read")),
    "kernel_wrote_foreign": (lambda w: True, write_foreign),
    "published_stale": (lambda w: True, steal_at("_exit")),
    "waits_for_nobody": (lambda w: any(d.attempts for d in w.decodes), hang_up_quietly),
    "refusal_changed_state": (lambda w: True, refusal),
    "pages_not_back": (lambda w: True, leak),
    "crash": (running, crash),
}

# Other ways to break a law that has more than one side.
ALSO = [
    ("wrong_length", lambda w: True, too_long),
    ("wrong_length", lambda w: True, deaf_to_ends),
    ("wrong_length", lambda w: True, too_few_before_the_end),
    ("claims_left", idle, stay_on_the_roll),
    ("abort_missed", several_answers_run, abort_one_answer),
    ("overdue", at_decode, give_up_in_secret),
    ("overdue", lambda w: True, expire_no_lease),
    ("overdue", lambda w: True, pull_for_ever),
    ("overdue", copying, quiet_for_long),
    ("overdue", lambda w: any(d.attempts for d in w.decodes), handoff_without_request),
    ("overdue", lambda w: True, lease_of_nobody),
    ("page_lost", running, miscount),
    ("counts_differ", running, hold_for_nobody),
    ("counts_differ", copying, forget_hold),
    ("counts_differ", running, share_at_decode),
    ("counts_differ", running, lease_at_decode),
    ("counts_differ", cached, hold_at_prefill),
]

# What is found in the very event in which it happened, and how it is told.
AT_ONCE = [
    (two_owners, "is claimed by"),
    (page_twice, "is claimed by"),
    (page_of_nobody, "who has no use"),
]
