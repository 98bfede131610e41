"""Where Mooncake listens. The library has variables that name a bind address; none of them binds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.transfer.mooncake import MooncakeEngine

LISTENS = "0A"
LOOPBACK = "0100007F"
# A process that has an engine on loopback, as a worker makes it, and tells when it listens.
CHILD = """
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
print("listening", flush=True)
input()
"""


def addresses(pid: int) -> set[str]:
    """Hexadecimal addresses on which a process listens, as its own tables have them."""
    folder = Path(f"/proc/{pid}")
    held = {os.readlink(link) for link in (folder / "fd").iterdir()}
    found = set()
    for name in ("net/tcp", "net/tcp6"):
        for line in (folder / name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in held:
                found.add(words[1].rsplit(":", 1)[0])
    return found


@pytest.mark.parametrize("variable", ["", "MC_TCP_BIND_ADDRESS", "MC_RDMA_BIND_ADDRESS"])
def test_mooncake_listens_everywhere_whatever_it_is_told(variable: str) -> None:
    """What `genlock doctor` warns of. Where this fails, a release of the library binds: then use it, and let doctor
    look at what listens."""
    if MooncakeEngine.available() is not None:
        pytest.skip("mooncake-transfer-engine is not installed")
    env = {**os.environ, **({variable: "127.0.0.1"} if variable else {})}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL,
                          text=True) as child:  # fmt: skip
        assert child.stdout is not None
        while "listening" not in (line := child.stdout.readline()):
            assert line, "it could not be started"
        told = addresses(child.pid)
        child.communicate("\n", timeout=60)
    assert told
    assert LOOPBACK not in told
    assert {address.strip("0") for address in told} == {""}, "every listener is on a wildcard"
