"""Laws about labels and ids, broken on purpose; see sabotage.py."""

from dataclasses import replace

from cluster.gateway.roll import Entry
from kvstore.errors import Cancelled, NoCapacity


def one_ticket_id(w):
    send = w.callers.send
    w.callers.send = lambda wish, ticket, *rest: send(wish, replace(ticket, ticket_id=bytes(16)), *rest)


def asked_that_runs(w):
    return next((one for one in w.callers.asked if one.runs_at(one.gateway)), None)


def abort_to_nobody(w):
    asked = asked_that_runs(w)
    asked.gateway.roll.abort = lambda tenant, label: 1
    w.callers.abort(asked.gateway, *asked.key)


def abort_unasked(w):
    asked_that_runs(w).stop(Cancelled("aborted_by_caller"))


def abort_with_another_count(w):
    asked = asked_that_runs(w)
    abort = asked.gateway.roll.abort
    asked.gateway.roll.abort = lambda *key: abort(*key) + 1
    w.callers.abort(asked.gateway, *asked.key)


def abort_one_answer(w):
    """Of a request of two: the other goes on."""
    asked = next(one for one in w.callers.asked if one.runs_at(one.gateway) and len(one.answers) > 1)
    asked.gateway.roll.leave(asked)
    asked.over = True
    asked.runs_at = lambda gateway: True
    asked.gateway.roll.abort = lambda tenant, label: 1
    w.callers.abort(asked.gateway, *asked.key)


def several_answers_run(w):
    return any(one.runs_at(one.gateway) and len(one.answers) > 1 for one in w.callers.asked)


def stay_on_the_roll(w):
    gateway = w.gateways[0]
    gateway.roll.enter(Entry(("ant", "gone"), int), 0)


def at_decode(w):
    return next((request for request in w.requests if request.at_decode is not None and not request.ended), None)


def give_up_in_secret(w):
    w.callers._cancel = lambda request: None
    w.callers._give_up(at_decode(w), NoCapacity("tired"))
