"""What is kept of a change under its idempotency key: whose it was and what was asked. Pure."""

from __future__ import annotations

import json

from cluster.control.api import Change
from kvstore.errors import Conflict
from kvstore.json_text import parse_json


def kept_of(change: Change, revision: int) -> bytes:
    """`revision`: the fleet's, once the change was carried out."""
    return json.dumps({"revision": revision, "actor": change.actor, "asked": change.asked}).encode()


def check_same(kept: bytes, change: Change) -> None:
    """Raises Conflict (`key_used`) where the key was another request's, or another operator's: to answer that the
    change is made already would be wrong. What an earlier release kept names neither and is taken for the same."""
    try:
        tree = parse_json(kept)
    except ValueError:
        return
    if not isinstance(tree, dict):
        return
    actor, asked = str(tree.get("actor", "")), str(tree.get("asked", ""))
    if (actor, asked) == (change.actor, change.asked):
        return
    rpc = asked.partition(" ")[0] or "a change"
    raise Conflict(
        "key_used",
        f"idempotency key {change.idempotency_key[:64]!r} was used for {rpc} by {actor}, with other fields or by "
        "another caller than now: take a new key for a new change",
        field="mutation.idempotency_key",
    )
