"""The routes of the HTTP door."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cluster.gateway.path import RequestPath
from cluster.gateway.state import GatewayState
from cluster.openai.call import HttpCall, credentials
from cluster.openai.errors import error_headers, error_object, http_status
from cluster.openai.openapi import document
from cluster.openai.replies import Served, model_object
from cluster.openai.requests import Kind
from kvstore.errors import GenlockError, InvalidInput, Unavailable
from wire.errors import surprise

Handler = Callable[[Request], Awaitable[Response]]


def make_app(state: GatewayState, unix_s: Callable[[], float]) -> Starlette:
    """The ASGI application over one gateway's state. `unix_s`: wall clock, for `created` alone."""
    info, tokenizer = state.served.info, state.served.tokenizer
    served = Served(info.name, f"fp_{info.revision[:12]}", tokenizer.bytes_of, tokenizer.stream, tokenizer.shows_tools)
    path = RequestPath(state)
    models = Models(state, int(unix_s()))
    app = Starlette(
        routes=[
            Route("/v1/models", _typed(models.listed), methods=["GET"]),
            Route("/v1/models/{name:path}", _typed(models.one), methods=["GET"]),
            Route("/v1/chat/completions", Generate(Kind.CHAT, state, path, served, unix_s), methods=["POST"]),
            Route("/v1/completions", Generate(Kind.COMPLETION, state, path, served, unix_s), methods=["POST"]),
            Route("/healthz", _live, methods=["GET"]),
            Route("/readyz", Ready(state), methods=["GET"]),
            # Where load generators and balancers made for other servers look.
            Route("/health", Ready(state), methods=["GET"]),
            Route("/openapi.json", _described, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _refused},
    )
    app.router.redirect_slashes = False
    return app


class Generate:
    """An ASGI application of its own: it must see the client leave."""

    def __init__(
        self, kind: Kind, state: GatewayState, path: RequestPath, served: Served, unix_s: Callable[[], float]
    ) -> None:
        self._kind = kind
        self._state = state
        self._path = path
        self._served = served
        self._unix_s = unix_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(self._kind, self._state, self._served, scope, receive, send, int(self._unix_s()))
        running = asyncio.create_task(self._path.run(call))
        watching = asyncio.create_task(_cancel_when_gone(call, running))
        try:
            await asyncio.wait([running])
        finally:
            watching.cancel()
            running.cancel()
            # Also when the server ends this request: nothing of it outlives this call.
            await asyncio.gather(running, watching, return_exceptions=True)
        if running.cancelled():
            return
        error = running.exception()
        try:
            if error is None:
                await call.finish()
                return
        except Exception as exc:
            error = exc
        await call.fail(surprise(error, scope["path"]))


async def _cancel_when_gone(call: HttpCall, running: asyncio.Task[None]) -> None:
    await call.gone()
    running.cancel()


class Models:
    """What is served: the model's own name first, then the name that it was configured by."""

    def __init__(self, state: GatewayState, created_s: int) -> None:
        self._state = state
        self._names = tuple(dict.fromkeys((state.limits.name, *state.limits.aliases)))
        self._created_s = created_s

    async def listed(self, request: Request) -> Response:
        self._check(request)
        models = [model_object(name, self._created_s) for name in self._names]
        return JSONResponse({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        self._check(request)
        name = request.path_params["name"]
        if name not in self._names:
            raise InvalidInput("unknown_model", f"{name[:80]!r} is not served here", field="model")
        return JSONResponse(model_object(name, self._created_s))

    def _check(self, request: Request) -> None:
        self._state.authenticator.caller(credentials(request.headers))


class Ready:
    """Whether a request can be served now. Names no worker: probes have no credential."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        if state.draining:
            response = _answer(Unavailable("draining", "this gateway is stopping and takes no new requests"))
        elif not state.takes:
            response = _answer(Unavailable("not_ready", "no worker of each role is ready"))
        else:
            response = JSONResponse({"status": "ready"})
        await response(scope, receive, send)


async def _live(_request: Request) -> Response:
    """The event loop turns."""
    return JSONResponse({"status": "live"})


async def _described(_request: Request) -> Response:
    return JSONResponse(document())


def _typed(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return _answer(surprise(error, request.url.path))

    return handle


def _answer(error: GenlockError) -> Response:
    return JSONResponse(error_object(error), http_status(error), error_headers(error))


async def _refused(request: Request, error: Exception) -> Response:
    """Paths and methods that are not there."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = Headers(error.headers).get("allow", "")
        response = _answer(InvalidInput("method_not_allowed", f"use {allowed} here" if allowed else "another method"))
        if allowed:
            response.headers["allow"] = allowed
        return response
    return _answer(InvalidInput("unknown_path", "there is nothing at this path; the API is under /v1"))
