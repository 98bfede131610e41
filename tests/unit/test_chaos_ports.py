"""Which ports of a process are the worker's own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from cluster.chaos.network import links_of
from cluster.chaos.ports import listeners, listening, note_the_hosts, own_ports

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0000000000000000 100 0
   1: 0100007F:1F91 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 222 1 0000000000000000 100 0
"""


def test_listening_sockets_are_told_from_connections():
    assert listeners(TABLE) == {"111": 8080}
    assert listeners("") == {}


def test_the_ports_of_a_process_are_those_of_its_own_sockets(tmp_path: Path):
    for name, table in (("net/tcp", TABLE), ("net/tcp6", TABLE.replace("111", "333").replace("1F90", "0050"))):
        (tmp_path / "7" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "7" / name).write_text(table)
    (tmp_path / "7/fd").mkdir()
    for at, target in enumerate(("socket:[111]", "socket:[222]", "/dev/null")):
        (tmp_path / "7/fd" / str(at)).symlink_to(target)
    assert listening(7, tmp_path) == {8080}, "333 is another process's"
    assert listening(8, tmp_path) == frozenset()


def test_what_listened_before_the_worker_was_made_is_not_the_workers(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as rays:
        note_the_hosts(str(tmp_path), "decode-1")
        with socket.create_server(("127.0.0.1", 0)) as grpcs, socket.create_server(("::1", 0), family=10) as engines:
            ports = [server.getsockname()[1] for server in (rays, grpcs, engines)]
            own = own_ports(str(tmp_path), "decode-1", os.getpid(), but=ports[1:2])
    assert ports[2] in own
    assert not {ports[0], ports[1]} & set(own)


def test_faults_of_the_link_are_between_a_far_decode_worker_and_a_near_prefill_worker():
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert links_of(names) == (("decode-0", "prefill-0"),)
    assert links_of([*names, "prefill-2"]) == (("decode-0", "prefill-0"), ("decode-0", "prefill-2"))
