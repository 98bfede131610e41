"""InferenceService: the gRPC door. A request takes the way of `cluster.gateway.path`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from cluster.gateway.admission import check_model, check_prompt, check_request_id
from cluster.gateway.identity import user
from cluster.gateway.path import RequestPath, deadline_ms, within
from cluster.gateway.peers import ask_peers
from cluster.gateway.places import Places
from cluster.gateway.running import RequestFacts
from cluster.gateway.state import GatewayState
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc as services
from wire.replies import Replies

# grpc.aio's context is generic in its stubs and not at run time.
Context = Any


class GrpcCall:
    """Implements `Call`."""

    def __init__(self, request: pb.GenerateRequest, context: Context) -> None:
        self._request = request
        self._context = context
        self._replies = Replies(context)

    @property
    def label(self) -> str:
        return self._request.request_id

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self._context.invocation_metadata() or ()

    def remaining_s(self) -> float | None:
        remaining: float | None = self._context.time_remaining()
        return remaining

    async def request(self, tenant: str) -> pb.GenerateRequest:
        return self._request

    def write(self, message: pb.GenerateResponse) -> Awaitable[None]:
        return self._replies.write(message)


class InferenceService(services.InferenceServiceServicer):
    """Handlers raise GenlockError; the server's interceptor makes statuses of them."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._path = RequestPath(state)
        self._aborting = Places("aborts of this caller are under way", state.config.api.retry_after_ms)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # writes to the context, so that the deadline also bounds a client that does not read
        await self._path.run(GrpcCall(request, context))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Counts among the tenant's running requests while it runs."""
        state = self._state
        caller = user(state.authenticator.caller(context.invocation_metadata() or ()))
        check_model(request.model, state.limits)
        prompt = check_prompt(request, state.limits, state.config.api)
        limit_ms = deadline_ms(state.config.api, context.time_remaining())
        received_ms, task = state.sources.now_ms(), asyncio.current_task()
        assert task is not None
        server_id = state.sources.random_bytes(8).hex()
        running = state.enter(caller, "", task, RequestFacts(server_id, received_ms, received_ms + limit_ms))
        try:
            async with within(running, limit_ms):
                token_ids = await state.encoder.encode(prompt, caller.tenant)
        finally:
            state.leave(running)
        return pb.TokenizeResponse(token_ids=token_ids, context_tokens=state.limits.context_tokens)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        self._state.authenticator.caller(context.invocation_metadata() or ())
        info, config = self._state.served.info, self._state.config
        return pb.GetModelInfoResponse(
            model=info.name,
            revision=info.revision,
            tokenizer_digest=self._state.served.tokenizer.digest,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            page_tokens=config.cache.page_tokens,
            kv_format=config.cache.kv_format,
            transfer_engine=config.transfer.engine,
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Only the caller's own requests: the same label of another tenant is another key. Every gateway that is asked
        judges the caller's credential itself, and looks among the requests of that tenant."""
        state, metadata = self._state, tuple(context.invocation_metadata() or ())
        caller = state.authenticator.caller(metadata)
        check_request_id(request.request_id)
        if request.local:
            return pb.AbortResponse(aborted=state.running.abort(caller.tenant, request.request_id))
        # Each asks all the others: no more at once than there can be requests to end.
        with self._aborting.held(caller.tenant, state.most_running(caller)):
            aborted = state.running.abort(caller.tenant, request.request_id)
            asked = pb.AbortRequest(request_id=request.request_id, local=True)
            heard = await ask_peers(state, lambda to: services.InferenceServiceStub(to).Abort, asked, metadata)
        return pb.AbortResponse(
            aborted=aborted + sum(one.aborted for one in heard.answers), gateways_unreached=len(heard.unreached)
        )
