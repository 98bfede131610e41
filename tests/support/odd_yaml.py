"""Texts that are nearly YAML, for whatever reads some."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = (
    "a", "b", "decode", "010", "1", "-0", "0x1F", "1_000", "12:30", "2024-02-30", "2024-13-45", "1e3", "1.5", ".inf",
    ".nan", "yes", "on", "null", "~", "<<", "=", "'", '"', "\\", '"\\ud800"', '"\\UFFFFFFFF"', "&a ", "*a", "*b", "&b ",
    "!", "!!int ", "!!python/object:os.system ", "!!binary ", "? ", ": ", ":", "- ", "-", ",", "[", "]", "{", "}",
    "|\n", ">-\n",
    "%YAML 1.1\n", "%YAML 1." + "9" * 5000 + "\n", "%TAG ! x\n", "---\n", "...\n", "#", "\n", "\n  ", "\t",
    "\x00", "\x85", "\ufeff", "\ud800", "é", "\U0001f600", "[" * 40, "{a: " * 40, "9" * 400, "@", "`",
)  # fmt: skip
# Those that can stand without quotes.
WORDS = tuple(piece for piece in PIECES if not set(piece) & set("!&*'\"\\[]{}%\x00\ud800"))
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=40)
