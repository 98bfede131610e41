"""How commands end at a gateway that misbehaves: a stub in this process that is slow, lies down, or tells errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from cluster.cli.main import (
    CONFLICT,
    FAILED,
    OK,
    REFUSED,
    TIMED_OUT,
    UNREACHABLE,
    UNREACHED,
    USAGE,
    exit_code_of,
    run,
)
from cluster.operators.explain import codes
from genlock.v1 import inference_pb2, inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvstore.errors import (
    Conflict,
    DeadlineExceeded,
    GenlockError,
    InvalidInput,
    NotFound,
    Refused,
    StalePage,
    Unavailable,
)
from wire.errors import DETAILS_KEY, to_status

DECODE_GOES = operator_pb2.FleetView(
    desired_prefill=1, desired_decode=1, revision=7,
    workers=[operator_pb2.FleetWorker(worker_id="decode-1", role="decode", phase="DRAINING", node="n")],
)  # fmt: skip


class Stub(operator_pb2_grpc.OperatorServiceServicer, inference_pb2_grpc.InferenceServiceServicer):
    """A fleet that never settles; `before` is done in front of each answer."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.before: Callable[[grpc.ServicerContext], None] = lambda context: None

    def _answer(self, request: Any, context: grpc.ServicerContext, reply: Any) -> Any:
        self.requests.append(request)
        self.before(context)
        return reply

    def GetFleet(self, request: Any, context: Any) -> Any:
        return self._answer(request, context, DECODE_GOES)

    def ListNodes(self, request: Any, context: Any) -> Any:
        return operator_pb2.ListNodesResponse(nodes=[operator_pb2.Node(node="n")])

    def Scale(self, request: Any, context: Any) -> Any:
        return self._answer(request, context, operator_pb2.ScaleResponse(fleet=DECODE_GOES))

    def Drain(self, request: Any, context: Any) -> Any:
        return self._answer(request, context, DECODE_GOES)

    def WatchEvents(self, request: Any, context: Any) -> Iterator[Any]:
        yield operator_pb2.FleetEvent(kind="scale")
        self.before(context)

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        yield inference_pb2.GenerateResponse(text="half")
        self.before(context)


@pytest.fixture
def gateway() -> Iterator[tuple[Stub, str, grpc.Server]]:
    stub = Stub()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(stub, server)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(stub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield stub, f"127.0.0.1:{port}", server
    server.stop(0).wait(5)


def told(error: GenlockError) -> Callable[[grpc.ServicerContext], None]:
    """The gateway ends the call with this error, as it does with all of its own."""

    def end(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(((DETAILS_KEY, to_status(error).SerializeToString()),))
        context.abort(grpc.StatusCode[error.status], error.message)

    return end


WAITS = [["scale", "decode=1"], ["drain", "decode-1", "--deadline", "30", "--force"]]


@pytest.mark.parametrize("args", WAITS, ids=lambda args: args[0])
@pytest.mark.parametrize(
    ("limits", "least_s", "most_s"),
    [
        (["--timeout", "1"], 1.0, 5.0),
        (["--timeout", "60", "--wait-timeout", "0.5"], 0.5, 5.0),
        (["--timeout", "1", "--wait-timeout", "2"], 2.0, 6.0),
    ],
    ids=["timeout", "wait-timeout", "both"],
)
def test_a_wait_ends_at_its_limit(gateway, args, limits, least_s: float, most_s: float, capsys):
    _stub, endpoint, _server = gateway
    began = time.monotonic()
    assert run([*args, "--wait", *limits, "--endpoint", endpoint]) == TIMED_OUT
    assert least_s <= time.monotonic() - began < most_s
    err = capsys.readouterr().err
    assert "decode-1 draining; it goes on" in err
    assert "(wait_timeout)" in err


@pytest.mark.parametrize(
    "args", [["scale", "decode=1"], ["drain", "n", "--replace", "--force"]], ids=["fleet settles", "node is left"]
)
def test_a_call_that_hangs_does_not_outlast_the_wait(gateway, args, capsys):
    stub, endpoint, _server = gateway
    free = threading.Event()

    def hang_when_looked_at(_context: grpc.ServicerContext) -> None:
        changed = any(not isinstance(request, operator_pb2.GetFleetRequest) for request in stub.requests)
        if changed and isinstance(stub.requests[-1], operator_pb2.GetFleetRequest):
            free.wait(20)

    stub.before = hang_when_looked_at
    began = time.monotonic()
    assert run([*args, "--wait", "--wait-timeout", "0.5", "--endpoint", endpoint]) == TIMED_OUT
    assert time.monotonic() - began < 10
    free.set()
    assert "has not answered" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--current", "--current-replicas"])
def test_current_has_two_names(gateway, option: str):
    stub, endpoint, _server = gateway
    args = ["scale", "prefill=4", "decode=10", option, "prefill=1", option, "decode=2", "--dry-run"]
    assert run([*args, "--endpoint", endpoint]) == OK
    (request,) = stub.requests
    assert (request.prefill, request.decode, request.current_prefill, request.current_decode) == (4, 10, 1, 2)
    assert run(["scale", "decode=10", option, "2", "--endpoint", endpoint]) == USAGE


@pytest.mark.parametrize(
    "args", [["get", "workers"], ["scale", "decode=1"], ["events", "--watch"], ["generate", "x"]], ids=lambda a: a[0]
)
def test_a_gateway_that_goes_away_was_not_reached(gateway, args: list[str], capsys):
    stub, endpoint, server = gateway
    stub.before = lambda _context: (server.stop(0), time.sleep(1))[1]
    assert run([*args, "--endpoint", endpoint]) == UNREACHABLE
    assert f"the gateway at {endpoint} went away before it had answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "error", "code"),
    [
        (["get", "workers"], Unavailable("controller_unreachable", "it does not answer"), UNREACHABLE),
        (["get", "workers"], Unavailable("no_controller", "none"), UNREACHABLE),
        (["scale", "decode=1"], Unavailable("registry_unreachable", "away"), UNREACHABLE),
        (["generate", "x"], Unavailable("peer_unreachable", "decode-0 does not answer"), FAILED),
        (["generate", "x"], Unavailable("prefill_unreachable", "prefill-0 does not answer"), FAILED),
        (["generate", "x"], Unavailable("worker_lost", "decode-0 died"), FAILED),
        (["generate", "x"], StalePage("stale_ref", "stale"), FAILED),
    ],
    ids=lambda value: value.reason if isinstance(value, GenlockError) else None,
)
def test_what_a_gateway_tells_has_its_own_code(gateway, args, error: GenlockError, code: int, capsys):
    stub, endpoint, _server = gateway
    stub.before = told(error)
    assert run([*args, "--endpoint", endpoint]) == code
    assert f"({error.reason})" in capsys.readouterr().err


NOT_REACHED = {
    "controller_not_serving", "controller_silent", "controller_unreachable", "gateways_unreached",
    "kube_unreachable", "no_controller", "peer_unreachable", "registry_unreachable",
}  # fmt: skip
# Of one request, told by a gateway that was reached.
OF_A_REQUEST = {"prefill_unreachable"}


@pytest.mark.parametrize("told", codes(), ids=lambda told: told.code)
def test_every_reason_has_its_code(told) -> None:
    kinds: dict[str, type[GenlockError]] = {
        "INVALID_ARGUMENT": InvalidInput, "ABORTED": Conflict, "FAILED_PRECONDITION": Refused,
        "DEADLINE_EXCEEDED": DeadlineExceeded, "UNAVAILABLE": Unavailable, "NOT_FOUND": NotFound,
    }  # fmt: skip
    expected = {
        "INVALID_ARGUMENT": USAGE, "ABORTED": CONFLICT, "FAILED_PRECONDITION": REFUSED, "DEADLINE_EXCEEDED": TIMED_OUT,
    }.get(told.status, UNREACHABLE if told.code in NOT_REACHED else FAILED)  # fmt: skip
    assert exit_code_of(kinds.get(told.status, GenlockError)(told.code)) == expected


def test_every_reason_of_that_kind_is_known() -> None:
    known = {one.code for one in codes()}
    assert known >= NOT_REACHED == UNREACHED
    named = {code for code in known if "unreachable" in code or "silent" in code or "no_controller" in code}
    assert named <= NOT_REACHED | OF_A_REQUEST, "say of each new reason whether it means that nobody was reached"
