"""A link between two network namespaces is cut and slowed for the ports of a pair, and for no other traffic."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from cluster.chaos import network
from cluster.chaos.network import Network, matches, packets_in
from cluster.chaos.ports import listening
from kvstore.errors import Unavailable

PATIENCE_S = 60.0
# On the far host: two servers and two clients of the near host; all say back whatever they hear.
FAR = """
import socket, sys, threading

def echo(sock):
    while data := sock.recv(65536):
        sock.sendall(data)

def start(sock):
    threading.Thread(target=echo, args=(sock,), daemon=True).start()

servers = [socket.create_server((sys.argv[1], 0)) for _ in range(2)]
for port in sys.argv[3:]:
    start(socket.create_connection((sys.argv[2], int(port))))
print(*(server.getsockname()[1] for server in servers), flush=True)
for server in servers:
    start(server.accept()[0])
sys.stdin.read()
"""


class Far:
    """Four connections with the far host: `calls` to its ports, `called` from it to ours."""

    def __init__(self, made: Network) -> None:
        own = [socket.create_server((made.near_host, 0)) for _ in range(2)]
        self.near_ports = [server.getsockname()[1] for server in own]
        command = ["ip", "netns", "exec", made._namespace, sys.executable, "-c", FAR, made.far_host, made.near_host]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, *map(str, self.near_ports)], stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.called = [server.accept()[0] for server in own]
        self.far_ports = [int(port) for port in self.process.stdout.readline().split()]
        self.own_listening = listening(self.process.pid)
        self.calls = [socket.create_connection((made.far_host, port)) for port in self.far_ports]
        for sock in (*self.called, *self.calls):
            sock.settimeout(PATIENCE_S)
        for server in own:
            server.close()

    def close(self) -> None:
        for sock in (*self.called, *self.calls):
            sock.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
async def made() -> AsyncIterator[Network]:
    if reason := network.why_not("nixl"):
        pytest.skip(f"no link can be made here: {reason}")
    net = Network()
    await net.start()
    try:
        yield net
    finally:
        await net.stop()


@pytest.fixture
async def far(made: Network) -> AsyncIterator[Far]:
    with contextlib.closing(Far(made)) as talking:
        yield talking


def says_back(sock: socket.socket, said: bytes) -> None:
    sock.sendall(said)
    heard(sock, said)


def heard(sock: socket.socket, said: bytes) -> None:
    got = b""
    while len(got) < len(said):
        got += sock.recv(65536)
    assert got == said


def silent(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return True
    finally:
        sock.settimeout(PATIENCE_S)


async def test_a_cut_between_a_pair_leaves_all_other_traffic_of_the_two_hosts(made: Network, far: Far):
    assert far.own_listening == set(far.far_ports), "what /proc tells, from this namespace of the other one's"
    async with made.fault(far.near_ports[:1], far.far_ports[:1], 0):
        for sock in (far.calls[0], far.called[0]):
            sock.sendall(b"cut")
        for _ in range(100):
            says_back(far.calls[1], b"whole")
            says_back(far.called[1], b"whole")
        assert silent(far.calls[0])
        assert silent(far.called[0])
    heard(far.calls[0], b"cut")
    heard(far.called[0], b"cut")
    assert made.packets >= 2


async def test_what_is_sent_back_is_cut_as_well(made: Network, far: Far):
    async with made.fault((), (), 0):  # no port: nobody's link
        says_back(far.calls[0], b"before")
    far.process.send_signal(signal.SIGSTOP)  # so that the answer is on its way only after the cut
    far.calls[0].sendall(b"answer me")
    async with made.fault((), far.far_ports[:1], 0):
        far.process.send_signal(signal.SIGCONT)
        for _ in range(100):
            says_back(far.calls[1], b"whole")
        assert silent(far.calls[0])
    heard(far.calls[0], b"answer me")


async def test_a_slow_link_carries_everything_and_two_faults_do_not_heal_each_other(made: Network, far: Far):
    block = bytes(range(256)) * 64
    async with made.fault((), far.far_ports[:1], 0):
        far.calls[0].sendall(b"cut")
        async with made.fault(far.near_ports[:1], (), 1024):
            says_back(far.called[0], block)
        assert made.packets >= len(block) // network.GSO_BYTES + 1
        says_back(far.calls[1], b"whole")
        assert silent(far.calls[0])
    heard(far.calls[0], b"cut")


async def test_a_fault_that_cannot_be_made_is_told_and_nothing_of_it_stays(made: Network, far: Far):
    with pytest.raises(Unavailable, match="tc"):
        async with made.fault(far.near_ports[:1], (-1,), 0):
            raise AssertionError("it was made")
    says_back(far.called[0], b"whole")
    says_back(far.calls[0], b"whole")


def test_filters_name_protocol_host_and_port():
    assert matches("src", "10.0.0.1", [80]) == [
        "match ip protocol 6 0xff match ip src 10.0.0.1/32 match ip sport 80 0xffff"
    ]
    assert [line.split()[-3:] for line in matches("dst", "10.0.0.1", [80, 81])] == [
        ["dport", "80", "0xffff"], ["dport", "81", "0xffff"]
    ]  # fmt: skip
    assert packets_in("Sent 10 bytes 3 pkt (dropped 4, overlimits 0") == 7
    assert packets_in("") == 0
