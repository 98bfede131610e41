"""Prompts of numbers for prefill's core, and what a right handoff of one is."""

from __future__ import annotations

from tests.support.core_world import PrefillSide, Token, next_token
from tests.support.kv_world import T, values_of


def prompt(start: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(start, start + tokens))


def first_of(ids) -> int:
    return next_token(sum(ids) / len(ids), len(ids))


def require_right(side: PrefillSide, seq) -> None:
    """The handoff promises exactly the prompt's pages, each holds the prompt's own values, and the token is right."""
    ids = seq.ticket.token_ids
    done = side.done[seq.request_no]
    descs = sorted(side.sealed[seq.request_no], key=lambda d: d.logical_index)
    assert done.page_count == len(descs) == -(-len(ids) // T)
    assert [d.logical_index for d in descs] == list(range(len(descs)))
    for desc in descs:
        at = desc.logical_index * T
        rows = ids[at : at + T]
        assert (desc.first_position, desc.valid_rows, desc.prefix_key) == (at, len(rows), seq.keys[desc.logical_index])
        if side.guard.is_live(desc.ref):
            assert values_of(side.guard, desc.ref.page_id)[: len(rows)] == [float(t) for t in rows]
    assert done.first == Token(first_of(ids))
