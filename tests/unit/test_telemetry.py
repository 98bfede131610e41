"""Tallies, families, the metrics port, log lines and trails, each by itself."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry

from cluster.gateway.metrics import GatewayMetrics, Outcome, outcome_of
from kvstore.errors import (
    Cancelled,
    CorruptPage,
    DeadlineExceeded,
    GenlockError,
    InvalidInput,
    NoCapacity,
    StalePage,
    Unavailable,
)
from kvstore.leases import LeaseTable
from tests.support.scrape import Scrape, get
from wire.causes import MAX_CAUSES
from wire.logs import JsonFormatter, TextFormatter, configure
from wire.metrics import bounded, verification
from wire.metrics_http import MAX_CONNECTIONS, MetricsServer, Target, reachable
from wire.tally import StepTally, Tally
from wire.tracing import NO_SPAN, NO_TRACER, Trail, current_request, incoming, make_tracer

# --- tallies --------------------------------------------------------------------------------------------------------


def test_a_tally_counts_as_prometheus_counts():
    tally = Tally((1, 4, 16))
    for value in (0, 1, 2, 4, 5, 16, 17, 1000):
        tally.add(value)
    reading = tally.read()
    assert reading.cumulative() == (("1", 2), ("4", 4), ("16", 6), ("+Inf", 8))
    assert (reading.count, reading.total) == (8, 1045)


def test_a_reading_does_not_move():
    tally = StepTally()
    before = tally.read()
    tally.add(3, 40)
    assert (before.rows.count, tally.read().rows.total, tally.read().tokens.total) == (0, 3, 40)


def test_leases_know_their_age():
    leases = LeaseTable(lease_ms=100, max_leases=2)
    leases.grant(b"a", 1000)
    leases.grant(b"b", 1500)
    leases.renew(b"a", 1600)
    assert leases.ages_ms(1700) == (700, 200), "a renewal makes no lease younger"


# --- families -------------------------------------------------------------------------------------------------------


def test_guard_counters_become_checks_and_events():
    checks, events = verification(
        {"receipt_digest/ok": 5, "receipt_digest/digest_mismatch": 1, "read_entry": 7, "write_rows": 3,
         "refused_stale_at_entry": 2, "sealed": 9}
    )  # fmt: skip
    assert checks == {
        ("receipt_digest", "ok"): 5, ("receipt_digest", "digest_mismatch"): 1, ("read_entry", "compared"): 7,
        ("write_rows", "compared"): 3, ("step", "stale_at_entry"): 2,
    }  # fmt: skip
    assert events == {"sealed": 9}


def test_invented_causes_do_not_grow_without_end():
    counts = {f"cause_{i}": 1 for i in range(MAX_CAUSES + 50)}
    kept = bounded(counts)
    assert len(kept) == MAX_CAUSES + 1
    assert kept["other"] == 50
    metrics = gateway_metrics()
    for cause in counts:
        metrics.ended(GenlockError(cause), 1.0)
    shown = exposed(metrics.registry).by("genlock_requests_total", "outcome", "cause")
    assert len(shown) <= MAX_CAUSES + 1
    assert sum(shown.values()) == MAX_CAUSES + 50


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.OK),
        (Cancelled("cancelled"), Outcome.CANCELLED),
        (InvalidInput("bad_x"), Outcome.REFUSED),
        (NoCapacity("gateway_full"), Outcome.SHED),
        (Unavailable("stream_cut"), Outcome.FAILED),
        (StalePage("stale_ref"), Outcome.FAILED),
        (CorruptPage("digest_mismatch"), Outcome.FAILED),
        (DeadlineExceeded("deadline_exceeded"), Outcome.FAILED),
        (GenlockError("internal"), Outcome.FAILED),
    ],
)
def test_how_a_request_ended(error, outcome):
    assert outcome_of(error) == (outcome, "ok" if error is None else error.reason)


def gateway_metrics() -> GatewayMetrics:
    from cluster.gateway.fleet import Fleet
    from cluster.gateway.metrics import GatewayReading

    counts = {one.name: 0 for one in fields(GatewayReading)}
    reading = GatewayReading(**{**counts, "version": "1", "model": "toy", "draining": False, "fleet": Fleet()})
    return GatewayMetrics(lambda: reading)


def exposed(registry: CollectorRegistry) -> Scrape:
    from prometheus_client import generate_latest

    return Scrape.of(generate_latest(registry).decode())


# --- the port -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    server = MetricsServer(CollectorRegistry(), lambda: [Target("10.0.0.1:9465", {"role": "decode"})])
    yield server
    server.stop()
    server.stop()


def test_the_port_serves_metrics_and_targets_and_nothing_else(server):
    port = server.start("127.0.0.1", 0)
    assert get(f"127.0.0.1:{port}") == ""
    assert json.loads(get(f"127.0.0.1:{port}", "/targets")) == [
        {"targets": ["10.0.0.1:9465"], "labels": {"role": "decode"}}
    ]
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"127.0.0.1:{port}", "/etc/passwd")
    assert caught.value.code == 404
    server.stop()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1)


def test_a_taken_port_is_named_and_the_next_one_is_tried(server):
    port = server.start("127.0.0.1", 0)
    other = MetricsServer(CollectorRegistry())
    with pytest.raises(Unavailable) as caught:
        other.start("127.0.0.1", port, setting="metrics.port")
    assert (caught.value.reason, caught.value.field) == ("port_taken", "metrics.port")
    try:
        assert other.start("127.0.0.1", port, tries=20) > port
    finally:
        other.stop()


def test_idle_connections_are_bounded(server):
    import socket

    port = server.start("127.0.0.1", 0)
    held = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(MAX_CONNECTIONS)]
    try:
        # The places are taken in the order of the connections, by one thread: this one finds none.
        late = socket.create_connection(("127.0.0.1", port), timeout=5)
        assert late.recv(1) == b"", "closed at once"
        late.close()
    finally:
        for one in held:
            one.close()


def test_a_wildcard_address_is_told_by_name():
    assert reachable("0.0.0.0", "10.1.2.3", 9465) == "10.1.2.3:9465"
    assert reachable("127.0.0.1", "10.1.2.3", 9465) == "127.0.0.1:9465"


# --- log lines ------------------------------------------------------------------------------------------------------


def record(message: str = "hello", error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("genlock.request", logging.WARNING, __file__, 1, message, None, info)
    for key, value in extra.items():
        setattr(made, key, value)
    return made


def raised() -> BaseException:
    try:
        try:
            raise ValueError("what the user wrote")
        except ValueError as inner:
            raise RuntimeError("quoted: what the user wrote") from inner
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("form", [TextFormatter("decode-0"), JsonFormatter("decode-0")])
def test_a_traceback_shows_classes_and_places_and_no_text(form):
    line = form.format(record(error=raised()))
    assert "the user wrote" not in line
    assert "RuntimeError at" in line
    assert "caused by ValueError at" in line
    assert "test_telemetry.py:" in line
    assert "\n" not in line


def test_lines_carry_the_request_they_are_about():
    token = current_request.set("of-the-task")
    try:
        assert json.loads(JsonFormatter("p").format(record()))["request_id"] == "of-the-task"
        named = json.loads(JsonFormatter("p").format(record(request_id="of-the-line")))
        assert named["request_id"] == "of-the-line"
        assert "[of-the-line]" in TextFormatter("p").format(record(request_id="of-the-line"))
    finally:
        current_request.reset(token)
    assert "request_id" not in json.loads(JsonFormatter("p").format(record()))


def test_a_line_is_one_line():
    assert TextFormatter("p").format(record("two\nlines")).endswith("two\\nlines")
    assert json.loads(JsonFormatter("p").format(record("two\nlines")))["message"] == "two\nlines"


@pytest.fixture
def logging_as_it_was():
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.raiseExceptions)
    levels = {name: logging.getLogger(name).level for name in ("genlock", "kvstore", "model", "wire", "prefill",
                                                               "decode", "cluster")}  # fmt: skip
    yield
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("logging_as_it_was")
def test_libraries_are_heard_from_warnings_on(tmp_path):
    configure("debug", "json", "decode-0", folder=str(tmp_path / "logs"))
    logging.getLogger("genlock.request").debug("ours")
    logging.getLogger("some.library").info("a library's")
    logging.getLogger("some.library").warning("a library's warning")
    lines = [json.loads(line) for line in (tmp_path / "logs" / "decode-0.log").read_text().splitlines()]
    assert [line["message"] for line in lines] == ["ours", "a library's warning"]
    assert lines[0]["part"] == "decode-0"


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput) as caught:
        configure("info", "text", "gateway", folder=str(tmp_path / "file" / "logs"))
    assert caught.value.field == "log.folder"


# --- trails ---------------------------------------------------------------------------------------------------------


def test_tracing_that_is_off_imports_nothing():
    code = (
        "import sys; from wire.tracing import NO_TRACER, make_tracer; import wire.metrics, wire.logs; "
        "assert make_tracer('', 'gateway', 1.0) is NO_TRACER; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_tracing_without_its_extra_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidInput) as caught:
        make_tracer("http://collector:4317", "gateway", 1.0)
    assert (caught.value.reason, caught.value.field) == ("tracing_not_installed", "tracing.endpoint")


def test_the_request_id_travels_without_tracing():
    trail = Trail("gateway", "0123456789abcdef", NO_SPAN)
    trail.enter("answer")
    token = current_request.set("")
    try:
        arrived = incoming(NO_TRACER, "decode", trail.metadata(), "decode-0")
        assert arrived.request_id == current_request.get() == "0123456789abcdef"
        assert incoming(NO_TRACER, "decode", [("genlock-request", b"\x00")], "d").request_id == ""
        assert len(incoming(NO_TRACER, "decode", [("genlock-request", "x" * 500)], "d").request_id) == 64
    finally:
        current_request.reset(token)


def test_a_trail_ends_once(caplog):
    trail = Trail("decode", "some-id")
    with caplog.at_level(logging.DEBUG, "genlock"):
        trail.enter("queue")
        trail.end("digest_mismatch")
        trail.end("cancelled")
        trail.enter("decode")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("DEBUG", "decode: queue"), ("INFO", "decode: ended digest_mismatch"),
    ]  # fmt: skip
    assert {r.request_id for r in caplog.records} == {"some-id"}
