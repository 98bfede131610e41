"""What the command line says when no call gets through to an endpoint."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.cli.main import UNREACHABLE, USAGE, run
from cluster.cli.reach import parsed
from cluster.devca import DevCertificates, make


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GENLOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[DevCertificates, DevCertificates]:
    """Certificates of a server, and those of another CA."""
    folder, now = tmp_path_factory.mktemp("tls"), datetime.datetime.now(datetime.UTC)
    return make(folder / "own", [], now), make(folder / "other", [], now)


@contextmanager
def listener(tls: DevCertificates | None) -> Iterator[str]:
    """Somebody who is no gateway: makes TLS connections where it has certificates, and ends each connection."""
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                try:
                    if context is None:
                        connection.sendall(b"not TLS\n")
                    else:
                        context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


@pytest.mark.parametrize(
    ("tls", "ca", "told"),
    [
        (True, "", "speaks TLS: name the CA that signed its certificate in GENLOCK_CA"),
        (
            True,
            "other",
            "is not trusted (unable to get local issuer certificate): name the CA that signed it in GENLOCK_CA",
        ),
        (False, "own", "does not speak TLS: unset GENLOCK_CA"),
        (False, "", "somebody listens there and does not answer as a gateway"),
        (True, "own", "somebody listens there and does not answer as a gateway"),
    ],
)
def test_who_listens_and_is_not_understood_is_told_by_what_to_do(made, monkeypatch, capsys, tls, ca, told):
    own, other = made
    if ca:
        monkeypatch.setenv("GENLOCK_CA", str((own if ca == "own" else other).ca))
    with listener(own if tls else None) as endpoint:
        assert run(["status", "--endpoint", endpoint, "--timeout", "0.3"]) == UNREACHABLE
        err = capsys.readouterr().err
    assert told in err
    assert endpoint in err


@pytest.mark.parametrize(
    "endpoint", ["localhost", "127.0.0.1:", ":50051", "http://127.0.0.1:50051", "h:0", "h:99999", "a b:1"]
)
@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_malformed_endpoint_is_wrong_usage_that_names_the_option(monkeypatch, capsys, endpoint, way):
    args = ["status", "--endpoint", endpoint] if way == "option" else ["status"]
    if way == "environment":
        monkeypatch.setenv("GENLOCK_ENDPOINT", endpoint)
    assert run(args) == USAGE
    err = capsys.readouterr().err
    assert "--endpoint" in err
    assert "HOST:PORT" in err


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [("127.0.0.1:50051", ("127.0.0.1", 50051)), ("[::1]:1", ("::1", 1)), ("gw.local:65535", ("gw.local", 65535))],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, place: tuple[str, int]):
    assert parsed(endpoint) == place
