"""JSON that others wrote: in files, in stores, from peers."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError for all that is none, bytes that are no text and nesting without end among it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
