"""Messages of worker.proto to dataclasses and back. Field checks happen here, once, at the border."""

from __future__ import annotations

from genlock.v1 import inference_pb2, worker_pb2
from kvstore.descriptor import PageDescriptor
from kvstore.errors import InvalidInput
from kvstore.header import KEY_BYTES
from kvstore.ids import PageRef, Tag
from kvstore.transfer.base import PoolExport
from model.base import ModelInfo
from model.sampler import SampledToken, validate
from model.sampling import SamplingParams
from model.ticket import FinishReason, Ticket

ID_BYTES = 16
MAX_TENANT_CHARS = 256
MAX_DURATION_MS = float(1 << 53)

_FINISH_TO_PROTO = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}


def require_id(raw: bytes, field: str) -> bytes:
    """A server-made id of 16 bytes. Raises InvalidInput naming `field`."""
    if len(raw) != ID_BYTES:
        raise InvalidInput("bad_id", f"{field} must be {ID_BYTES} bytes", field=field)
    return raw


def finish_to_proto(reason: FinishReason) -> inference_pb2.FinishReason.ValueType:
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(value: inference_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for FINISH_REASON_UNSPECIFIED and values of later versions."""
    return _FINISH_FROM_PROTO.get(value)


def ticket_to_proto(ticket: Ticket) -> worker_pb2.Ticket:
    s = ticket.sampling
    return worker_pb2.Ticket(
        ticket_id=ticket.ticket_id,
        tenant=ticket.tenant,
        token_ids=ticket.token_ids,
        sampling=worker_pb2.Sampling(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            seed=s.seed,
            max_tokens=s.max_tokens,
            min_tokens=s.min_tokens,
            stop_token_ids=s.stop_token_ids,
            ignore_eos=s.ignore_eos,
            logprobs=s.logprobs,
            json_schema=s.json_schema,
        ),
        model_revision=ticket.model_revision,
        tokenizer_digest=ticket.tokenizer_digest,
        generated_tokens=ticket.generated_tokens,
    )


def ticket_from_proto(message: worker_pb2.Ticket, vocab_size: int) -> Ticket:
    """Raises InvalidInput naming the field: bad id, no tokens, ids outside the vocabulary, impossible counts."""
    ids = tuple(message.token_ids)
    if not ids:
        raise InvalidInput("empty_prompt", "the ticket has no tokens", field="ticket.token_ids")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidInput("token_out_of_range", "a token id is outside the vocabulary", field="ticket.token_ids")
    if not 0 <= message.generated_tokens < len(ids):
        raise InvalidInput(
            "bad_count", "generated_tokens must be below the token count", field="ticket.generated_tokens"
        )
    if not message.tenant or len(message.tenant) > MAX_TENANT_CHARS:
        raise InvalidInput("bad_tenant", "the ticket names no tenant", field="ticket.tenant")
    s = message.sampling
    if s.max_tokens < 1:
        raise InvalidInput("bad_max_tokens", "max_tokens must be at least 1", field="ticket.sampling.max_tokens")
    return Ticket(
        ticket_id=require_id(message.ticket_id, "ticket.ticket_id"),
        tenant=message.tenant,
        token_ids=ids,
        sampling=SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            seed=s.seed,
            max_tokens=s.max_tokens,
            min_tokens=s.min_tokens,
            stop_token_ids=tuple(s.stop_token_ids),
            ignore_eos=s.ignore_eos,
            logprobs=s.logprobs,
            json_schema=s.json_schema,
        ),
        model_revision=message.model_revision,
        tokenizer_digest=message.tokenizer_digest,
        generated_tokens=message.generated_tokens,
    )


def served_ticket(message: worker_pb2.Ticket, info: ModelInfo) -> Ticket:
    """A ticket for the model that is served here. Raises InvalidInput naming the field: what `ticket_from_proto` and
    `validate` refuse, another model revision, another tokenizer."""
    ticket = ticket_from_proto(message, info.vocab_size)
    if ticket.model_revision != info.revision:
        raise InvalidInput("model_differs", "the ticket is for another model revision", field="ticket.model_revision")
    if ticket.tokenizer_digest != info.tokenizer_digest:
        raise InvalidInput("tokenizer_differs", "the ticket's tokenizer differs", field="ticket.tokenizer_digest")
    validate(
        ticket.sampling,
        context_tokens=info.context_tokens,
        prompt_tokens=ticket.prompt_tokens,
        vocab_size=info.vocab_size,
    )
    return ticket


def token_to_proto(token: SampledToken) -> worker_pb2.SampledToken:
    return worker_pb2.SampledToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top=[worker_pb2.SampledLogprob(token_id=t, logprob=lp) for t, lp in token.top],
    )


def token_from_proto(message: worker_pb2.SampledToken) -> SampledToken:
    return SampledToken(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((t.token_id, t.logprob) for t in message.top),
    )


def first_token_from_proto(message: worker_pb2.SampledToken, vocab_size: int, asked: int) -> SampledToken:
    """A token that another worker sampled. `asked`: the sampling's logprobs. Raises InvalidInput: an id outside the
    vocabulary, a log-probability that is no number, other log-probabilities than were asked for."""
    ids = (message.token_id, *(entry.token_id for entry in message.top))
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidInput("token_out_of_range", "a token id is outside the vocabulary", field="first_token.token_id")
    logprobs = (message.logprob, *(entry.logprob for entry in message.top))
    as_asked = message.HasField("logprob") is (asked >= 0) and len(message.top) == min(max(0, asked), vocab_size)
    if not as_asked or not all(value < 0.01 for value in logprobs):
        raise InvalidInput(
            "bad_logprobs",
            "log-probabilities must be numbers up to 0, as many as asked for",
            field="first_token.logprob",
        )
    return token_from_proto(message)


def count_from_proto(value: int, most: int, field: str) -> int:
    """A count that another worker told. Raises InvalidInput naming `field` unless 0 to `most`."""
    if not 0 <= value <= most:
        raise InvalidInput("bad_count", f"{field} must be 0 to {most}, is {value}", field=field)
    return value


def duration_from_proto(value: float, field: str) -> float:
    """Milliseconds that another worker measured. Raises InvalidInput naming `field` unless finite and not negative."""
    if not 0 <= value < MAX_DURATION_MS:
        raise InvalidInput("bad_duration", f"{field} must be finite and at least 0", field=field)
    return value


def export_to_proto(export: PoolExport) -> worker_pb2.PoolExport:
    return worker_pb2.PoolExport(
        engine=export.engine,
        incarnation=export.incarnation,
        layout=export.layout,
        slots=export.slots,
        slot_bytes=export.slot_bytes,
        address=export.address,
        beacon=None if export.beacon is None else descriptor_to_proto(export.beacon),
    )


def export_from_proto(message: worker_pb2.PoolExport) -> PoolExport:
    if message.incarnation <= 0:
        raise InvalidInput("bad_incarnation", "an incarnation is a positive number", field="pool.incarnation")
    if message.slots < 1:
        raise InvalidInput("bad_pool", "a pool has at least one slot", field="pool.slots")
    return PoolExport(
        engine=message.engine,
        incarnation=message.incarnation,
        layout=message.layout,
        slots=message.slots,
        slot_bytes=message.slot_bytes,
        address=message.address,
        beacon=descriptor_from_proto(message.beacon) if message.HasField("beacon") else None,
    )


def descriptor_to_proto(desc: PageDescriptor) -> worker_pb2.PageDescriptor:
    return worker_pb2.PageDescriptor(
        page_id=desc.ref.page_id,
        incarnation=desc.ref.tag.incarnation,
        generation=desc.ref.tag.generation,
        logical_index=desc.logical_index,
        first_position=desc.first_position,
        valid_rows=desc.valid_rows,
        byte_length=desc.byte_length,
        layout_fingerprint=desc.layout_fingerprint,
        prefix_key=desc.prefix_key,
        digest=desc.digest,
    )


def descriptor_from_proto(message: worker_pb2.PageDescriptor) -> PageDescriptor:
    """Shape only; whether it may be believed is the receipt's to judge."""
    if len(message.prefix_key) != KEY_BYTES:
        raise InvalidInput("bad_descriptor", f"prefix_key must be {KEY_BYTES} bytes", field="page.prefix_key")
    tag = Tag(message.incarnation, message.generation)
    if not tag.valid:
        raise InvalidInput("bad_descriptor", "a tag is never zero", field="page.generation")
    return PageDescriptor(
        ref=PageRef(message.page_id, tag),
        logical_index=message.logical_index,
        first_position=message.first_position,
        valid_rows=message.valid_rows,
        byte_length=message.byte_length,
        layout_fingerprint=message.layout_fingerprint,
        prefix_key=message.prefix_key,
        digest=message.digest,
    )
