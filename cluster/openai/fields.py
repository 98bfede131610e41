"""A JSON object whose fields are read by type. Pure. `null` is as good as absent, as OpenAI's clients have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

from cluster.gateway.admission import MAX_VALUES
from kvstore.errors import InvalidInput

# Each value but the first of all has one of these before it; commas serve names and values alike.
_BETWEEN = (b",", b"[", b"{")
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1


def parse_object(body: bytes, most_values: int = MAX_VALUES) -> Fields:
    """The JSON object in `body`. Raises InvalidInput (`bad_json`, `too_many_values`); its text is never quoted, it may
    hold a prompt."""
    check_values(body, most_values)
    try:
        tree = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInput("bad_json", f"the body is not valid JSON{where}", field="body") from None
    if not isinstance(tree, dict):
        raise InvalidInput("bad_json", "the body must be a JSON object", field="body")
    return Fields(tree)


def check_values(body: bytes, most: int) -> None:
    """Raises InvalidInput (`too_many_values`) where JSON in `body` would have more than `most` values: two bytes of a
    body can become an object of sixty. In a few passes of the library over the bytes, none of which makes objects by
    the value; a body that is no JSON is left to the parser."""
    if sum(map(body.count, _BETWEEN)) <= most:
        return
    # Text has such marks, too: only what is outside of it counts.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') <= 4 * most:
        outside = b"".join(bare.split(b'"')[::2])
        if sum(map(outside.count, _BETWEEN)) <= most:
            return
    raise InvalidInput("too_many_values", f"the body has more than {most} values", field="body")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def bad(reason: str, field: str, what: str) -> InvalidInput:
    return InvalidInput(reason, f"{field} {what}", field=field)


def checked_text(value: object, field: str) -> str:
    """`value` as text that UTF-8 can carry. Raises InvalidInput."""
    if not isinstance(value, str):
        raise bad("bad_type", field, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad("bad_text", field, "is not valid Unicode: it holds half of a surrogate pair") from None
    return value


class Fields:
    """Readers return None for a field that is absent and raise InvalidInput naming one that is of another type."""

    def __init__(self, tree: Mapping[str, object], path: str = "") -> None:
        self._tree = tree
        self._path = path

    def name_of(self, name: str) -> str:
        """The field's path in the body."""
        return f"{self._path}.{name}" if self._path else name

    @property
    def tree(self) -> Mapping[str, object]:
        return self._tree

    def raw(self, name: str) -> object:
        return self._tree.get(name)

    def text(self, name: str) -> str | None:
        value = self._tree.get(name)
        return None if value is None else checked_text(value, self.name_of(name))

    def flag(self, name: str) -> bool | None:
        value = self._tree.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise bad("bad_type", self.name_of(name), "must be true or false")

    def whole(self, name: str, low: int = INT32_MIN, high: int = INT32_MAX) -> int | None:
        value = self._tree.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad("bad_type", self.name_of(name), "must be a whole number")
        if not low <= value <= high:
            raise bad(f"bad_{name}", self.name_of(name), f"must be between {low} and {high}")
        return value

    def number(self, name: str) -> float | None:
        value = self._tree.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise bad("bad_type", self.name_of(name), "must be a number")
        try:
            return float(value)
        except OverflowError:
            raise bad(f"bad_{name}", self.name_of(name), "is out of range") from None

    def items(self, name: str) -> list[object] | None:
        value = self._tree.get(name)
        if value is None or isinstance(value, list):
            return value
        raise bad("bad_type", self.name_of(name), "must be a list")

    def group(self, name: str) -> Fields | None:
        """An object inside this one."""
        value = self._tree.get(name)
        return None if value is None else as_fields(value, self.name_of(name))


def as_fields(value: object, path: str) -> Fields:
    if not isinstance(value, dict):
        raise bad("bad_type", path, "must be an object")
    return Fields(value, path)
