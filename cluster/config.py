"""The one reader of configuration: defaults < file < environment < flags. Everything else gets a frozen `Config`.

    file          YAML or TOML: sections with fields, e.g. `cache: {page_tokens: 64}`
    environment   GENLOCK_<SECTION>_<FIELD>, e.g. GENLOCK_CACHE_PAGE_TOKENS=64
    flags         section.field -> value, made by the command line

This module is pure: the environment and the file's text are arguments. Every value remembers where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from cluster.settings import Config
from cluster.strict_yaml import PLAIN_INT, YamlReader, shown
from kvstore.errors import InvalidInput

ENV_PREFIX = "GENLOCK_"
# Read by the command line itself, not settings of the cluster.
ENV_NOT_SETTINGS = frozenset({"GENLOCK_CONFIG", "GENLOCK_CA", "GENLOCK_ENDPOINT", "GENLOCK_TOKEN"})
MASK = "********"
SECRET_BYTES = 32
DEFAULT_SOURCE = "default"
SETTINGS_TEXT = YamlReader("bad_config_file", "config")

# Kubernetes writes such variables into every pod for a Service whose name starts with "genlock".
_SERVICE_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_LINK_VALUE = re.compile(r"^(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Setting:
    """One effective value and where it came from; `value` is masked for secrets."""

    key: str
    value: str | int | float | bool
    source: str
    doc: str


@dataclass(frozen=True)
class LoadedConfig:
    config: Config
    sources: Mapping[str, str]

    def settings(self) -> tuple[Setting, ...]:
        """All values in order, secrets masked."""
        out = []
        for key, spec in _fields():
            section, name = key.split(".")
            value = getattr(getattr(self.config, section), name)
            shown = MASK if spec.metadata["secret"] and value else value
            out.append(Setting(key, shown, self.sources[key], spec.metadata["doc"]))
        return tuple(out)


def load(
    *,
    file_text: str | None = None,
    file_name: str = "config.yaml",
    environ: Mapping[str, str] = MappingProxyType({}),
    flags: Mapping[str, object] = MappingProxyType({}),
) -> LoadedConfig:
    """Merges all layers. Flags that are None were not given. Raises InvalidInput naming `section.field` and the fix."""
    specs = dict(_fields())
    values: dict[str, object] = {}
    sources = dict.fromkeys(specs, DEFAULT_SOURCE)
    layers = (
        (_file_values(file_text, file_name), lambda _key: f"file {file_name}"),
        (_environ_values(environ, specs), _env_name),
        ({key: value for key, value in flags.items() if value is not None}, lambda _key: "flag"),
    )
    for layer, source_of in layers:
        for key, raw in layer.items():
            if key not in specs:
                raise _unknown(key, specs, source_of(key))
            values[key] = _parse(key, raw, specs[key], source_of(key))
            sources[key] = source_of(key)
    config = Config()
    for section in dataclasses.fields(Config):
        own = {key.split(".")[1]: value for key, value in values.items() if key.startswith(f"{section.name}.")}
        config = replace(config, **{section.name: replace(getattr(config, section.name), **own)})
    _check_together(config)
    return LoadedConfig(config, MappingProxyType(sources))


def with_secret(config: Config, random_bytes: Callable[[int], bytes]) -> Config:
    """The same config with a cluster secret: the configured one, or a fresh random one."""
    if config.cluster.secret:
        return config
    return replace(config, cluster=replace(config.cluster, secret=random_bytes(SECRET_BYTES).hex()))


def _fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    defaults = Config()
    for section in dataclasses.fields(Config):
        for spec in dataclasses.fields(getattr(defaults, section.name)):
            yield f"{section.name}.{spec.name}", spec


def _env_name(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "_").upper()


def _file_values(text: str | None, name: str) -> dict[str, object]:
    if text is None:
        return {}
    tree = _toml(text, name) if name.endswith(".toml") else SETTINGS_TEXT.tree(text, name)
    if tree is None:
        return {}
    section_form = "must be a section with fields, as in `cache: {page_tokens: 32}`"
    if not isinstance(tree, dict):
        raise SETTINGS_TEXT.error(f"= {shown(tree)} must hold sections; each {section_form}", name)
    out: dict[str, object] = {}
    for section, fields_ in tree.items():
        if fields_ is None:
            continue  # a section whose fields are all remarks
        if not isinstance(fields_, dict):
            raise SETTINGS_TEXT.error(section_form, name, path=section)
        out.update({f"{section}.{key}": value for key, value in fields_.items()})
    return out


def _toml(text: str, name: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError: TOML's own, and numbers of more digits than are read.
        where = " ".join(str(error).split())[:300]
        raise SETTINGS_TEXT.error(f"is no TOML: {where}", name) from error


def _environ_values(environ: Mapping[str, str], specs: Mapping[str, object]) -> dict[str, object]:
    known = {_env_name(key): key for key in specs}
    out: dict[str, object] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in ENV_NOT_SETTINGS:
            continue
        if _SERVICE_LINK_NAME.search(name) or _SERVICE_LINK_VALUE.match(value):
            continue
        if name not in known:
            hint = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {hint[0]}?" if hint else "unset it; `genlock config` lists all settings"
            raise InvalidInput("unknown_setting", f"environment variable {name} is no setting: {fix}", field=name)
        out[known[name]] = value
    return out


def _unknown(key: str, specs: Mapping[str, object], source: str) -> InvalidInput:
    hint = difflib.get_close_matches(key, specs, n=1)
    fix = f"did you mean {hint[0]}?" if hint else "`genlock config` lists all settings"
    named = key[:80]
    return InvalidInput("unknown_setting", f"{named} ({source}) is no setting: {fix}", field=named)


def _parse(key: str, raw: object, spec: dataclasses.Field[Any], source: str) -> object:
    rules = spec.metadata

    def bad(fix: str) -> InvalidInput:
        # A URL may carry a password where it should not.
        said = MASK if rules["secret"] else re.sub(r"://[^/]*@", f"://{MASK}@", shown(raw, 80))
        return InvalidInput("bad_setting", f"{key} = {said} ({source}): {fix}", field=key)

    blank = rules["empty"] is not None and (raw is None or (isinstance(raw, str) and not raw.strip()))
    value = rules["empty"] if blank else _typed(raw, type(spec.default))
    if value is None:
        raise bad(f"must be {_KINDS[type(spec.default)]}")
    if rules["choices"] and value not in rules["choices"]:
        raise bad("must be one of " + ", ".join(rules["choices"]))
    low, high = rules["low"], rules["high"]
    if isinstance(value, int | float) and low is not None and not low <= value <= high:
        raise bad(f"must be between {low} and {high}")
    if rules["check"] is not None and (wrong := rules["check"](value)):
        raise bad(wrong)
    return value


_KINDS = MappingProxyType({bool: "true or false", int: "a whole number", float: "a number", str: "text"})
_BOOLS = MappingProxyType({"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False})


def _typed(raw: object, kind: type) -> object:
    """`raw` as `kind`, or None. Texts are parsed: environment variables know nothing else."""
    if kind is bool:
        return raw if isinstance(raw, bool) else _BOOLS.get(raw.strip().lower()) if isinstance(raw, str) else None
    if isinstance(raw, bool):
        return None
    try:
        if kind is int:
            # Neither 010 nor 1_000: the first may mean 8, and files refuse both.
            plainly = isinstance(raw, int) or (isinstance(raw, str) and PLAIN_INT.fullmatch(raw.strip()))
            return int(raw) if plainly and isinstance(raw, int | str) else None
        if kind is float:
            if isinstance(raw, str) and "_" in raw:
                return None
            number = float(raw) if isinstance(raw, int | float | str) else math.nan
            return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None
    # A path given as pathlib.Path, a number used as a name: not text, so the file needs quotes.
    return raw if isinstance(raw, str) else None


def _check_together(config: Config) -> None:
    if config.api.default_deadline_ms > config.api.max_deadline_ms:
        raise InvalidInput(
            "bad_setting",
            f"api.default_deadline_ms = {config.api.default_deadline_ms} is above api.max_deadline_ms = "
            f"{config.api.max_deadline_ms}: lower the first or raise the second",
            field="api.default_deadline_ms",
        )
    if config.api.max_prompt_bytes > config.api.max_message_bytes:
        raise InvalidInput(
            "bad_setting",
            f"api.max_prompt_bytes = {config.api.max_prompt_bytes} does not fit api.max_message_bytes = "
            f"{config.api.max_message_bytes}: lower the first or raise the second",
            field="api.max_prompt_bytes",
        )
    if config.kube.enabled and config.kube.node_timeout_ms >= config.workers.start_timeout_ms:
        raise InvalidInput(
            "bad_setting",
            f"kube.node_timeout_ms = {config.kube.node_timeout_ms} is not below workers.start_timeout_ms = "
            f"{config.workers.start_timeout_ms}: a start waits for its pod and then loads the model",
            field="kube.node_timeout_ms",
        )
