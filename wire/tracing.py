"""A request's trail through one process: its id in every log line, its phases as spans where tracing is on.

Off is the default, costs a method call and imports nothing. The context travels in gRPC metadata: the request's
server-made id always, W3C `traceparent` where tracing is on. Attributes are counts and names: see ATTRIBUTES.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Protocol

from kvstore.errors import InvalidInput

REQUEST_KEY = "genlock-request"
MAX_ID_CHARS = 64
OK = "ok"
# Ends that a worker's log need not show by default.
QUIET = frozenset({OK, "cancelled"})
# What spans may carry. No text of a prompt or an answer, no token ids, no tenant.
ATTRIBUTES = frozenset({"request_id", "worker", "peer", "cause", "prompt_tokens", "tokens", "cached_tokens", "pages"})

Metadata = tuple[tuple[str, str], ...]
Value = str | int | float | bool

log = logging.getLogger("genlock.request")
# The request that the present task serves: log lines carry it. Set once at the door of each process.
current_request: ContextVar[str] = ContextVar("genlock_request", default="")


class Span(Protocol):
    """A piece of time that is being measured; `ago_ms`: it began, or ended, so long ago. Ending twice has no
    effect."""

    def child(self, name: str, ago_ms: float = 0.0, **attributes: Value) -> Span: ...

    def set(self, **attributes: Value) -> None: ...

    def carrier(self) -> Metadata:
        """What makes a span of another process a child of this one."""
        ...

    def end(self, cause: str = OK, ago_ms: float = 0.0) -> None: ...


class Tracer(Protocol):
    def begin(self, name: str, metadata: Metadata, **attributes: Value) -> Span:
        """A span under the one that `metadata` carries, or a new trace's first."""
        ...

    def close(self) -> None:
        """Sends what is left, within a limit."""
        ...


class NoSpan:
    """Measures nothing."""

    def child(self, name: str, ago_ms: float = 0.0, **attributes: Value) -> Span:
        return self

    def set(self, **attributes: Value) -> None:
        return

    def carrier(self) -> Metadata:
        return ()

    def end(self, cause: str = OK, ago_ms: float = 0.0) -> None:
        return


NO_SPAN = NoSpan()


class NoTracer:
    """Tracing is off."""

    def begin(self, name: str, metadata: Metadata, **attributes: Value) -> Span:
        return NO_SPAN

    def close(self) -> None:
        return


NO_TRACER = NoTracer()


class Trail:
    """One request in one process: phases, one after another, then one end. Calls come from one thread at a time."""

    def __init__(self, where: str, request_id: str, span: Span = NO_SPAN, *, level: int = logging.DEBUG) -> None:
        """`where` names the process' part; `level` is that of the line about a good end."""
        self.request_id = request_id
        self._where = where
        self._span = span
        self._phase: Span = NO_SPAN
        self._level = level
        self._ended = False

    def enter(self, phase: str, ago_ms: float = 0.0, **attributes: Value) -> None:
        """The former phase is over and `phase` begins, now or `ago_ms` ago."""
        if self._ended:
            return
        self._phase.end(ago_ms=ago_ms)
        self._phase = self._span.child(phase, ago_ms, **attributes)
        log.debug("%s: %s", self._where, phase, extra={"request_id": self.request_id})

    def child(self, name: str, **attributes: Value) -> Span:
        """A span within the present phase; whoever asks for it ends it."""
        return self._phase.child(name, 0.0, **attributes)

    def set(self, **attributes: Value) -> None:
        self._span.set(**attributes)

    def metadata(self) -> Metadata:
        """For a call to another process, made in the present phase."""
        return ((REQUEST_KEY, self.request_id), *self._phase.carrier())

    def end(self, cause: str = OK, **facts: Value) -> None:
        """The request is over in this process. Later ends have no effect. `facts` stand in the log line."""
        if self._ended:
            return
        self._ended = True
        self._phase.end(cause)
        self._span.end(cause)
        level = self._level if cause in QUIET else max(self._level, logging.INFO)
        if log.isEnabledFor(level):
            shown = "".join(f" {key}={value}" for key, value in facts.items())
            log.log(level, "%s: ended %s%s", self._where, cause, shown, extra={"request_id": self.request_id})


def no_trail() -> Trail:
    """For callers that follow nothing."""
    return Trail("", "")


def incoming(tracer: Tracer, where: str, metadata: Iterable[tuple[str, str | bytes]], worker: str) -> Trail:
    """The trail of a call from another part of the cluster; its log lines carry the caller's request id from here
    on."""
    texts = tuple((key, value) for key, value in metadata if isinstance(value, str))
    request_id = next((value[:MAX_ID_CHARS] for key, value in texts if key == REQUEST_KEY), "")
    current_request.set(request_id)
    return Trail(where, request_id, tracer.begin(where, texts, request_id=request_id, worker=worker))


def make_tracer(endpoint: str, part: str, sample_ratio: float) -> Tracer:
    """The tracer of one process, `part` its name; an empty endpoint is off. Raises InvalidInput where the extra is not
    installed."""
    if not endpoint:
        return NO_TRACER
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise InvalidInput(
            "tracing_not_installed", "tracing.endpoint needs the extra: pip install 'genlock[tracing]'",
            field="tracing.endpoint",
        )  # fmt: skip
    from wire.tracing_otel import otlp_tracer

    return otlp_tracer(endpoint, part, sample_ratio)
