"""Which Genlock this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def app_version() -> str:
    """The installed version; `0.0.0+source` where it is run without being installed."""
    try:
        return version("genlock")
    except PackageNotFoundError:
        return "0.0.0+source"
