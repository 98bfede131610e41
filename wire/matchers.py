"""Matchers for the requests of one worker, made beside its step thread."""

from __future__ import annotations

import asyncio

from kvstore.errors import InvalidInput
from model.grammar import FIELD, AnswerMatcher, Grammars
from model.ticket import Ticket


async def matcher_for(ticket: Ticket, grammars: Grammars | None) -> AnswerMatcher | None:
    """None for an answer that may be any text. Raises what `Grammars.start` raises, and InvalidInput where this worker
    has no vocabulary to keep an answer to a schema."""
    schema = ticket.sampling.json_schema
    if not schema:
        return None
    if grammars is None:
        raise InvalidInput("json_schema_unsupported", f"{FIELD}: this worker keeps no answer to a schema", field=FIELD)
    generated = ticket.token_ids[ticket.prompt_tokens :]
    made = grammars.turns.submit(ticket.tenant, lambda: grammars.start(schema, generated, tenant=ticket.tenant))
    return await asyncio.wrap_future(made)
