"""Values of a body are counted before anything is built of them."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest

from cluster.gateway.admission import MAX_MESSAGES, MAX_VALUES
from cluster.gateway.pool import INLINE_BYTES
from cluster.openai import call
from cluster.openai.fields import check_values, parse_object
from cluster.openai.requests import Kind, read_ask
from kvstore.errors import InvalidInput
from tests.support.decode_calls import ScriptedCall
from tests.support.fake_workers import finished, tokens
from tests.unit.test_openai_call import make_state, post


def values_of(tree: object) -> int:
    if isinstance(tree, dict):
        return 1 + sum(map(values_of, tree.values()))
    return 1 + sum(map(values_of, tree)) if isinstance(tree, list) else 1


def drawn(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        return "".join(rng.choice('a,[{"\\\\é:}]') for _ in range(rng.randrange(12)))
    if kind < 4:
        return (7, True, None)[kind - 1]
    items = [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    return items if kind == 4 else {f'k"{index},\\': item for index, item in enumerate(items)}


@pytest.mark.parametrize("ascii_alone", [True, False])
def test_a_count_is_never_less_than_half_of_the_values_and_text_is_no_value(ascii_alone: bool):
    """Each list and object counts once more for what begins it, so the count is between the values and twice that."""
    rng = random.Random(3)
    for _ in range(2000):
        tree = {"a": drawn(rng, 4), "text": ',[{"\\' * 50}
        body = json.dumps(tree, ensure_ascii=ascii_alone).encode()
        values = values_of(tree)
        check_values(body, 2 * values)
        # Of a list or object that is not empty the first value has the bracket's mark.
        least = sum(map(_marks, (tree,)))
        check_values(body, least)
        with pytest.raises(InvalidInput):
            check_values(body, least - 1)


def _marks(tree: object) -> int:
    if isinstance(tree, dict | list):
        inner = list(tree.values()) if isinstance(tree, dict) else tree
        return 1 + max(0, len(inner) - 1) + sum(map(_marks, inner))
    return 0


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"{}," * MAX_VALUES + b"{}]",
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" * (MAX_VALUES + 1),
        b'["' + b'","' * MAX_VALUES + b'"]',
        b'{"prompt": "\\\\", "x": [' + b"{}," * MAX_VALUES + b"{}]}",
        b'{"prompt": "\\\\\\"", "x": [' + b"{}," * MAX_VALUES + b"{}]}",
    ],
    ids=["objects", "numbers", "lists", "texts", "after a backslash", "after both"],
)
def test_a_body_of_too_many_values_is_refused(body: bytes):
    with pytest.raises(InvalidInput) as caught:
        parse_object(body)
    assert (caught.value.reason, caught.value.field) == ("too_many_values", "body")


@pytest.mark.parametrize("text", [",[{" * MAX_VALUES, '",' * MAX_VALUES, "\\," * MAX_VALUES, '\\"{' * MAX_VALUES])
def test_marks_within_text_are_text(text: str):
    assert parse_object(json.dumps({"prompt": text}).encode()).text("prompt") == text


def test_messages_are_counted_before_they_are_read():
    body = parse_object(json.dumps({"model": "toy", "messages": [{}] * (MAX_MESSAGES + 1)}).encode())
    with pytest.raises(InvalidInput) as caught:
        read_ask(Kind.CHAT, body, "")
    assert (caught.value.reason, caught.value.field) == ("too_many_messages", "messages")


@pytest.mark.parametrize("long", [True, False])
async def test_a_long_body_is_read_on_a_thread(long: bool, monkeypatch):
    threads: list[threading.Thread] = []
    read = call.read_ask

    def noting(*args: object, **kwargs: object):
        threads.append(threading.current_thread())
        return read(*args, **kwargs)

    monkeypatch.setattr(call, "read_ask", noting)
    state = make_state([ScriptedCall(tokens("a"), finished(1))])
    padding = "x" * INLINE_BYTES if long else ""
    body = json.dumps({"model": "toy", "prompt": "hi", "max_tokens": 1, "user": padding}).encode()
    client, task = post(state, body)
    await asyncio.wait_for(task, 20)
    assert client.status == 200
    assert (threads[0] is not threading.main_thread()) is long
    assert len(threads) == 1
