"""Log lines of a Genlock process: text or JSON, each with its request's id, none with an exception's text.

An exception's text may quote a prompt, so a traceback shows classes and places alone. Libraries log under their own
names; they are heard from WARNING on, whatever our level is.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TextIO

from kvstore.errors import InvalidInput
from wire.tracing import current_request

LEVELS: Mapping[str, int] = MappingProxyType(
    {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
)
# Loggers of this product: `genlock.*` by name, and modules that log under their own.
OWN = ("genlock", "kvstore", "model", "wire", "prefill", "decode", "cluster")
FORMATS = ("text", "json")
MAX_LINE_CHARS = 8_192

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING genlock.request decode-0 [5f0c...] decode: ended digest_mismatch`"""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        request = request_id(record)
        words = (
            timestamp(record.created), record.levelname, record.name, self._part, f"[{request}]" if request else "",
            one_line(record.getMessage()), where(record),
        )  # fmt: skip
        return " ".join(word for word in words if word)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, part, request_id where there is one, message, error where there is
    one."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "part": self._part,
            "request_id": request_id(record),
            "message": record.getMessage()[:MAX_LINE_CHARS],
            "error": where(record),
        }
        return json.dumps({key: value for key, value in fields.items() if value or key == "message"})


def request_id(record: logging.LogRecord) -> str:
    """The request that a line is about: named by the line, else the one that the present task serves."""
    return str(getattr(record, "request_id", "") or current_request.get())


def timestamp(unix_s: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(unix_s))}.{int(unix_s * 1000) % 1000:03d}Z"


def one_line(text: str) -> str:
    return text[:MAX_LINE_CHARS].replace("\n", "\\n").replace("\r", "\\r")


def where(record: logging.LogRecord) -> str:
    """Classes and places of an exception and of its causes, never their text."""
    info = record.exc_info
    error = info[1] if isinstance(info, tuple) else None
    parts: list[str] = []
    while error is not None and len(parts) < 8:
        frames = traceback.extract_tb(error.__traceback__)
        places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-6:]))
        parts.append(f"{type(error).__name__} at {places or '?'}")
        error = error.__cause__
    return "; caused by ".join(parts)


def configure(level: str, style: str, part: str, *, folder: str = "", stream: TextIO | None = None) -> None:
    """Sets up the logging of this process, in place of whatever was set up. `part` names the process in each line and
    is its file's name in `folder`; without a folder lines go to `stream`, stderr by default.

    Raises InvalidInput for a folder that cannot be written to.
    """
    handler: logging.Handler
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(Path(folder) / f"{part}.log", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(
                "bad_log_folder", f"cannot write logs to {folder}: {error.strerror}", field="log.folder"
            ) from error
    else:
        handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(part) if style == "json" else TextFormatter(part))
    # A line that cannot be written must not end a request.
    logging.raiseExceptions = False
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OWN:
        logging.getLogger(name).setLevel(LEVELS[level])
