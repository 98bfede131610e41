"""Configuration: layers, sources, limits, messages."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest

from cluster.config import MASK, LoadedConfig, load, with_secret
from cluster.settings import Config
from kvstore.errors import InvalidInput


def refused(**layers: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        load(**layers)
    return caught.value


def source(loaded: LoadedConfig, key: str) -> str:
    return loaded.sources[key]


def test_defaults_fit_a_laptop_and_name_their_source():
    loaded = load()
    assert loaded.config == Config()
    assert (loaded.config.model.name, loaded.config.cache.page_tokens, loaded.config.transfer.engine) == (
        "smollm2",
        32,
        "shm",
    )
    assert set(loaded.sources.values()) == {"default"}


def test_each_layer_beats_the_one_before_and_is_remembered():
    text = "cache: {page_tokens: 64, decode_pages: 100, prefill_pages: 90}\nworkers: {decode: 3}\n"
    environ = {"GENLOCK_CACHE_DECODE_PAGES": "200", "GENLOCK_CACHE_PREFILL_PAGES": "91", "HOME": "/"}
    loaded = load(
        file_text=text, file_name="my.yaml", environ=environ, flags={"cache.prefill_pages": 300, "api.port": None}
    )
    cache = loaded.config.cache
    assert (cache.page_tokens, cache.decode_pages, cache.prefill_pages) == (64, 200, 300)
    assert source(loaded, "cache.page_tokens") == "file my.yaml"
    assert source(loaded, "cache.decode_pages") == "GENLOCK_CACHE_DECODE_PAGES"
    assert source(loaded, "cache.prefill_pages") == "flag"
    assert source(loaded, "api.port") == "default"


@pytest.mark.parametrize("layers", [
    {"environ": {"GENLOCK_API_HTTP_PORT": ""}}, {"environ": {"GENLOCK_API_HTTP_PORT": " "}},
    {"flags": {"api.http_port": ""}},
    {"file_text": "api: {http_port: }"}, {"file_text": "api: {http_port: -1}"},
])  # fmt: skip
def test_an_empty_http_port_is_off(layers: dict):
    assert load(**layers).config.api.http_port == -1
    assert load().config.api.http_port == 8000


def test_an_empty_port_of_the_gateway_is_an_error():
    assert refused(environ={"GENLOCK_API_PORT": ""}).field == "api.port"


def test_toml_is_read_too():
    assert load(file_text="[cache]\nscrub = true\n", file_name="x.toml").config.cache.scrub is True


@pytest.mark.parametrize("text", ["", "# nothing\n", "cache:\n  # page_tokens: 64\n"])
def test_an_empty_file_changes_nothing(text: str):
    assert load(file_text=text).config == Config()


@pytest.mark.parametrize(
    ("layers", "field", "hint"),
    [
        ({"file_text": "cache: {page_token: 3}"}, "cache.page_token", "cache.page_tokens"),
        ({"file_text": "cach: {page_tokens: 32}"}, "cach.page_tokens", "cache.page_tokens"),
        ({"environ": {"GENLOCK_CACHE_PAGE_TOKEN": "3"}}, "GENLOCK_CACHE_PAGE_TOKEN", "GENLOCK_CACHE_PAGE_TOKENS"),
        ({"flags": {"cache.nope": 3}}, "cache.nope", "genlock config"),
        ({"file_text": "cache: 3"}, "cache", "section"),
        ({"file_text": "just text"}, "config", "section"),
        ({"file_text": "a: [b"}, "config", "is no YAML"),
        ({"file_text": "a = ", "file_name": "c.toml"}, "config", "is no TOML"),
        ({"flags": {"cache.page_tokens": 30}}, "cache.page_tokens", "multiple of 4"),
        ({"flags": {"cache.page_tokens": 0}}, "cache.page_tokens", "between 4 and 1024"),
        ({"environ": {"GENLOCK_API_PORT": "many"}}, "api.port", "whole number"),
        ({"environ": {"GENLOCK_API_PORT": "65536"}}, "api.port", "between 0 and 65535"),
        ({"file_text": "cache: {page_tokens: true}"}, "cache.page_tokens", "whole number"),
        ({"file_text": "cache: {page_tokens: 32.0}"}, "cache.page_tokens", "whole number"),
        ({"file_text": "cache: {scrub: maybe}"}, "cache.scrub", "true or false"),
        ({"file_text": "model: {name: 7}"}, "model.name", "text"),
        ({"flags": {"model.name": " "}}, "model.name", "empty"),
        ({"flags": {"cache.kv_format": "int3"}}, "cache.kv_format", "int8"),
        ({"flags": {"cache.kv_format": "fp8"}}, "cache.kv_format", "int8, none"),
        ({"flags": {"cluster.secret": "hunter2"}}, "cluster.secret", "hexadecimal"),
        ({"flags": {"api.default_deadline_ms": 9_000_000}}, "api.default_deadline_ms", "max_deadline_ms"),
        ({"flags": {"api.max_prompt_bytes": 20 << 20}}, "api.max_prompt_bytes", "max_message_bytes"),
    ],
)
def test_bad_settings_name_the_field_and_the_fix(layers: dict, field: str, hint: str):
    error = refused(**layers)
    assert error.field == field
    assert hint in error.message


def test_a_refused_secret_is_not_quoted():
    assert "hunter2" not in refused(flags={"cluster.secret": "hunter2"}).message


def test_variables_that_kubernetes_makes_for_services_are_not_settings():
    environ = {
        "GENLOCK_API_PORT": "tcp://10.0.0.7:50051",
        "GENLOCK_API_SERVICE_HOST": "10.0.0.7",
        "GENLOCK_API_SERVICE_PORT_GRPC": "50051",
        "GENLOCK_API_PORT_50051_TCP_ADDR": "10.0.0.7",
        "GENLOCK_CONFIG": "/etc/genlock.yaml",
    }
    assert load(environ=environ).config == Config()


def test_settings_are_masked_and_complete():
    secret = "ab" * 32
    settings = {setting.key: setting for setting in load(flags={"cluster.secret": secret}).settings()}
    assert settings["cluster.secret"].value == MASK
    assert settings["workers.decode"].value == 1
    assert all(setting.doc for setting in settings.values())
    assert {one.key: one for one in load().settings()}["cluster.secret"].value == ""


def test_a_secret_is_drawn_once_and_kept_when_given():
    drawn = with_secret(Config(), lambda count: b"\x07" * count)
    assert drawn.cluster.secret == "07" * 32
    assert with_secret(drawn, lambda count: b"\x08" * count) == drawn
    assert pickle.loads(pickle.dumps(drawn)) == drawn


@pytest.mark.parametrize("key", ["workers.speculative_tokens", "model.draft", "speculation.enabled"])
def test_no_setting_turns_drafts_on(key: str):
    """Neither at prefill nor at decode: a page's rows are the tokens' own, and there is nothing to differ in."""
    error = refused(flags={key: 4})
    assert (error.reason, error.field) == ("unknown_setting", key)
    [group, name] = key.split(".")
    assert refused(environ={f"GENLOCK_{group}_{name}".upper(): "4"}).reason == "unknown_setting"
    names = {f.name for part in fields(Config) for f in fields(getattr(Config(), part.name))}
    assert not [n for n in names if "draft" in n or "specul" in n]
