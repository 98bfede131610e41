"""The HTTP port that Prometheus scrapes: one a process, a registry of its own, bounded in connections and in time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvstore.errors import Unavailable

OFF = -1
ANY = 0
PORTS_TO_TRY = 64
MAX_CONNECTIONS = 8
CONNECTION_TIMEOUT_S = 10
STOP_TIMEOUT_S = 5.0
STOP_POLL_S = 0.1
WILDCARDS = frozenset({"", "0.0.0.0", "::", "[::]"})


@dataclass(frozen=True)
class Target:
    """One endpoint to scrape, as Prometheus' HTTP discovery has it."""

    endpoint: str
    labels: Mapping[str, str]


Targets = Callable[[], Sequence[Target]]


class MetricsServer:
    """Serves `/metrics`, and `/targets` where `targets` is given: the other endpoints of the cluster, for
    `http_sd_configs`."""

    def __init__(self, registry: CollectorRegistry, targets: Targets | None = None) -> None:
        self._metrics = make_wsgi_app(registry)
        self._targets = targets
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int, *, tries: int = 1, setting: str = "metrics.port") -> int:
        """Listens on the first free port of `tries` from `port` on (0: any) and returns it. Raises Unavailable
        (`port_taken`) naming `setting`."""
        server = _bind(host, port, tries, setting)
        server.set_app(self._answer)
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(STOP_POLL_S,), name="metrics", daemon=True)
        self._thread.start()
        return server.server_port

    def stop(self) -> None:
        """Ends the port. May be called twice, and without a start."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        if path == "/targets" and self._targets is not None:
            groups = [{"targets": [t.endpoint], "labels": dict(t.labels)} for t in self._targets()]
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(groups).encode()]
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"see /metrics\n"]


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line each."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # A port that another process listens on is an error; one in TIME_WAIT is not.
    allow_reuse_address = True
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int]) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # WSGIServer asks the resolver for its own name, which may take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away is not worth a traceback."""


def _bind(host: str, port: int, tries: int, setting: str) -> _Server:
    last: OSError | OverflowError | None = None
    for candidate in range(port, port + (1 if port == ANY else tries)):
        try:
            return _Server((host, candidate))
        except (OSError, OverflowError) as error:
            last = error
    raise Unavailable(
        "port_taken", f"cannot listen on {host}:{port}: choose another {setting} (0: any free one; -1: none)",
        field=setting,
    ) from last  # fmt: skip


def reachable(host: str, known_as: str, port: int) -> str:
    """`host:port` for others: a wildcard address is replaced by the name that this process is known by."""
    return f"{known_as if host in WILDCARDS else host}:{port}"
