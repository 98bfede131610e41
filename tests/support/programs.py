"""Programs that others wrote and that only some hosts have."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program(name: str) -> str | None:
    """Beside this interpreter, or where the shell finds it."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)
