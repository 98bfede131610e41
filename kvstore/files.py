"""Small files, read whole and within a limit. What is wrong with one is an InvalidInput that names the setting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvstore.errors import InvalidInput

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class FileReader:
    """Reads files of one kind. Each method raises InvalidInput with `reason` and `field`; `advice` ends its message."""

    reason: str
    field: str
    limit: int = MAX_FILE_BYTES
    advice: str = ""

    def text(self, path: str | Path) -> str:
        """A file of UTF-8; line ends come as `\\n`."""
        return self._decoded(self.data(path), path)

    def data(self, path: str | Path) -> bytes:
        """A file of any bytes."""
        try:
            with Path(path).open("rb") as stream:
                return self._within(stream, path)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise self._error(path, error) from error

    def stream(self, stream: BinaryIO, name: str) -> str:
        """UTF-8 from what is open already, to its end; `name` is what the message calls it."""
        try:
            data = self._within(stream, name)
        except OSError as error:
            raise self._error(name, error) from error
        return self._decoded(data, name)

    def _within(self, stream: BinaryIO, name: str | Path) -> bytes:
        # Not the size that the system tells: a pipe has none, and a file may grow.
        data = stream.read(self.limit + 1)
        if len(data) > self.limit:
            raise self._error(name, f"it is longer than {self.limit} bytes")
        return data

    def _decoded(self, data: bytes, name: str | Path) -> str:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(name, f"byte {error.start} is no UTF-8") from error
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _error(self, name: str | Path, why: str | Exception) -> InvalidInput:
        said = getattr(why, "strerror", None) or why
        advice = f"; {self.advice}" if self.advice else ""
        return InvalidInput(self.reason, f"{name} cannot be read: {said}{advice}", field=self.field)
