"""The OpenAPI document: it is one, it has the door's routes and fields, and what the door answers is as it says."""

from __future__ import annotations

from unittest.mock import MagicMock

import httpx2
import jsonschema
import pytest

from cluster.openai import openapi
from cluster.openai.app import make_app
from cluster.openai.fields import Fields
from cluster.openai.openapi import document, fields_of
from cluster.openai.requests import TRANSFER, UNSUPPORTED, Kind, read_ask
from tests.support.fake_workers import finished, say, tokens
from tests.support.http_door import scripted

DOCUMENT = document()
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
FULL = {
    **CHAT, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "max_tokens": 3, "seed": 4, "logprobs": True,
    "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "response_format": {"type": "text"},
    "tools": [{"type": "function"}], "tool_choice": "auto", "priority": "low", "top_k": -1, "min_p": 0.1,
    "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [3], "ignore_eos": True, "best_of": None,
}  # fmt: skip


def check(value: object, schema: dict) -> None:
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator.check_schema(whole)
    jsonschema.Draft202012Validator(whole).validate(value)


def body(path: str) -> dict:
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def answer(path: str, method: str, status: str) -> dict:
    return DOCUMENT["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]


def test_routes_are_those_of_the_door():
    routes = make_app(MagicMock(), lambda: 0.0).routes
    there = {(route.path.replace(":path}", "}"), m.lower()) for route in routes for m in {*route.methods} - {"HEAD"}}
    assert there == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_fields_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch):
    chat, completion = fields_of(Kind.CHAT), fields_of(Kind.COMPLETION)
    assert {*chat, *completion} == set(openapi._SAID)
    assert not {*chat, *completion} & {*UNSUPPORTED, *TRANSFER}
    assert {*chat} ^ {*completion} == {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "prompt",
    }  # fmt: skip
    assert (chat["seed"]["type"], chat["logprobs"]["type"][0]) == (["integer", "null"], "boolean")
    assert completion["logprobs"]["type"][0] == "integer"
    monkeypatch.setattr(openapi, "_SAID", {name: said for name, said in openapi._SAID.items() if name != "seed"})
    with pytest.raises(LookupError):
        fields_of(Kind.CHAT)


def test_bodies_that_are_served_fit_and_others_do_not():
    for fields in (CHAT, FULL, {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}):
        read_ask(Kind.CHAT, Fields(fields), "")
        check(fields, body("/v1/chat/completions"))
    for prompt in ("x", [1, 2], ["x"], [[1]]):
        read_ask(Kind.COMPLETION, Fields({"model": "m", "prompt": prompt}), "")
        check({"model": "m", "prompt": prompt, "logprobs": 2}, body("/v1/completions"))
    for wrong in ({}, {**CHAT, "n": "2"}, {**CHAT, "messages": [{}]}, {**CHAT, "response_format": {"type": "xml"}}):
        with pytest.raises(jsonschema.ValidationError):
            check(wrong, body("/v1/chat/completions"))


async def test_the_door_serves_it_and_answers_as_it_says():
    async with scripted(say(tokens("ab"), finished(2))) as env, httpx2.AsyncClient() as client:
        base = env.url.removesuffix("/v1")
        assert (await client.get(base + "/openapi.json")).json() == DOCUMENT
        for path in ("/v1/models", "/v1/models/toy", "/healthz", "/readyz"):
            schema = answer(path.replace("toy", "{name}"), "get", "200")
            check((await client.get(base + path)).json(), schema)
        for path, fields in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "toy", "prompt": "x"})):
            check((await client.post(base + path, json=fields)).json(), answer(path, "post", "200"))
            refused = await client.post(base + path, json={**fields, "n": 99})
            assert refused.status_code == 400
            check(refused.json(), answer(path, "post", "default"))
