"""Every field of a request is checked here, before any worker is called and before any text is tokenized. Pure.

Errors are InvalidInput whose `field` is the path in the request message, as `sampling_params.top_p`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from cluster.settings import ApiConfig
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput
from kvstore.json_text import parse_json
from model.sampling import MAX_SCHEMA_BYTES, SamplingParams

MAX_REQUEST_ID_CHARS = 128
MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
# Values of all kinds in one request, beside a token id for each place of the context.
MAX_VALUES = 65_536
# A message of the wire beside its text and its ids: schema, stop texts, names.
OTHER_BYTES = 256 << 10
# The longest way to write a byte of text: \u and four digits; and a token id with what is around it.
ESCAPED_BYTES, ID_BYTES = 6, 12
MAX_NAME_CHARS = 256
MAX_TOOLS = 128
MAX_TOOL_DEPTH = 32
MAX_SCHEMA_DEPTH = 64
# What all multipleOf of a schema come to. Compiling 99991 takes most of the time that a schema may take, so that it
# passed at one time and not at another; with this it takes a fraction of it.
MAX_MULTIPLES = 32_768
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0
DEFAULT_MAX_TOKENS = 128
FloatField = Literal["temperature", "top_p", "min_p", "repetition_penalty"]
IntField = Literal["top_k", "min_tokens", "logprobs"]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Turn:
    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """Exactly one of text, turns and ids is set. `field` is its path in the request; `tools` are JSON objects."""

    field: str
    text: str | None = None
    turns: tuple[Turn, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelLimits:
    """`aliases`: other names that requests may use. `longest_token_bytes`: most text that one token stands for; 0 where
    it is not known."""

    name: str
    vocab_size: int
    context_tokens: int
    aliases: tuple[str, ...] = ()
    longest_token_bytes: int = 0

    @property
    def most_text_bytes(self) -> int:
        """Text beyond this has more tokens than the context, whichever they are; 0: not known."""
        return self.context_tokens * self.longest_token_bytes


def message_bytes(model: ModelLimits, limits: ApiConfig) -> int:
    """The longest message that a door takes: the setting, or less where no prompt that fits the context needs it."""
    if not model.longest_token_bytes:
        return limits.max_message_bytes
    text = min(limits.max_prompt_bytes, model.most_text_bytes)
    return min(limits.max_message_bytes, OTHER_BYTES + max(ESCAPED_BYTES * text, ID_BYTES * model.context_tokens))


@dataclass(frozen=True)
class Draft:
    """A checked request whose prompt is not tokens yet. `max_tokens` None: as many as fit, at most the default."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None
    choices: int
    stream: bool
    seed_given: bool


def check_request(request: pb.GenerateRequest, model: ModelLimits, limits: ApiConfig) -> Draft:
    """The request as a draft. Raises InvalidInput."""
    check_request_id(request.request_id)
    check_model(request.model, model)
    prompt = check_prompt(request, model, limits)
    params = request.sampling_params
    choices = params.n if params.HasField("n") else 1
    if not 1 <= choices <= MAX_CHOICES:
        raise _bad("bad_n", "sampling_params.n", f"must be between 1 and {MAX_CHOICES}, is {choices}")
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens is not None and not 1 <= max_tokens <= model.context_tokens:
        raise _bad(
            "bad_max_tokens",
            "sampling_params.max_tokens",
            f"must be between 1 and the context of {model.context_tokens} tokens, is {max_tokens}",
        )
    return Draft(
        request_id=request.request_id,
        prompt=prompt,
        sampling=_sampling(params, model),
        max_tokens=max_tokens,
        choices=choices,
        stream=request.stream if request.HasField("stream") else True,
        seed_given=params.HasField("seed"),
    )


def fit_sampling(
    draft: Draft, prompt_tokens: int, model: ModelLimits, default_max_tokens: int = DEFAULT_MAX_TOKENS
) -> SamplingParams:
    """The draft's sampling with `max_tokens` settled. Raises InvalidInput when prompt and answer do not fit."""
    field = draft.prompt.field
    if prompt_tokens < 1:
        raise _bad("empty_prompt", field, "gives no tokens")
    room = model.context_tokens - prompt_tokens
    if room < 1:
        raise _too_long(field, f"{prompt_tokens} tokens", model)
    wanted = draft.max_tokens
    if wanted is not None and wanted > room:
        raise _bad(
            "max_tokens_over_context",
            "sampling_params.max_tokens",
            f"is {wanted}, but after a prompt of {prompt_tokens} tokens only {room} fit the context of "
            f"{model.context_tokens}",
        )
    max_tokens = min(default_max_tokens, room) if wanted is None else wanted
    if draft.sampling.min_tokens > max_tokens:
        raise _bad(
            "bad_min_tokens",
            "sampling_params.min_tokens",
            f"is {draft.sampling.min_tokens}, above max_tokens = {max_tokens}",
        )
    return replace(draft.sampling, max_tokens=max_tokens)


def choice_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: the request's own for the first, independent ones for the others."""
    if index == 0:
        return seed
    mixed = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8, person=b"choice")
    return int.from_bytes(mixed.digest(), "little")


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise _bad("bad_request_id", "request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters")


def check_model(name: str, model: ModelLimits) -> None:
    if name and name not in (model.name, *model.aliases):
        raise _bad("unknown_model", "model", f"{name[:80]!r} is not served here; use {model.name!r}")


def check_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, model: ModelLimits, limits: ApiConfig) -> Prompt:
    """The prompt of a request, within the limits of size. Raises InvalidInput."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        _check_size(len(request.text.encode()), "text", model, limits)
        if not request.text:
            raise _bad("empty_prompt", "text", "must not be empty")
        return Prompt("text", text=request.text)
    if kind == "chat":
        return Prompt("chat", turns=_turns(request.chat, model, limits), tools=_tools(request.chat))
    if kind == "tokens" and isinstance(request, pb.GenerateRequest):
        return Prompt("tokens", token_ids=_token_ids(request.tokens, model))
    raise _bad("no_prompt", "prompt", "is missing: set text, chat or tokens")


def _turns(chat: pb.ChatPrompt, model: ModelLimits, limits: ApiConfig) -> tuple[Turn, ...]:
    if not chat.messages:
        raise _bad("no_messages", "chat.messages", "must hold at least one message")
    if len(chat.messages) > MAX_MESSAGES:
        raise _bad("too_many_messages", "chat.messages", f"must hold at most {MAX_MESSAGES} messages")
    turns = tuple(
        Turn(one.role, one.content, one.name, one.tool_call_id, tuple(one.tool_calls)) for one in chat.messages
    )
    texts = [*chat.tools, *(text for turn in turns for text in (turn.content, *turn.tool_calls))]
    size_bytes = sum(len(text.encode()) for text in texts)
    _check_size(size_bytes, "chat.messages", model, limits)
    for index, turn in enumerate(turns):
        if turn.role not in ROLES:
            raise _bad(
                "bad_role", f"chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}; is {turn.role[:40]!r}"
            )
        for name, value in (("name", turn.name), ("tool_call_id", turn.tool_call_id)):
            if len(value) > MAX_NAME_CHARS:
                raise _bad(f"bad_{name}", f"chat.messages[{index}].{name}", f"is over {MAX_NAME_CHARS} characters")
        if turn.tool_calls and turn.role != "assistant":
            raise _bad("bad_tool", f"chat.messages[{index}].tool_calls", "are for messages of the assistant")
        _check_objects(turn.tool_calls, f"chat.messages[{index}].tool_calls")
    return turns


def _tools(chat: pb.ChatPrompt) -> tuple[str, ...]:
    _check_objects(chat.tools, "chat.tools")
    return tuple(chat.tools)


def _check_objects(texts: Sequence[str], field: str) -> None:
    if len(texts) > MAX_TOOLS:
        raise _bad("too_many_tools", field, f"holds {len(texts)}; at most {MAX_TOOLS}")
    for index, text in enumerate(texts):
        try:
            tool = parse_json(text)
            fits = isinstance(tool, dict) and _fits(tool, MAX_TOOL_DEPTH)
        except ValueError:
            fits = False
        if not fits:
            raise _bad("bad_tool", f"{field}[{index}]", f"must be a JSON object of at most {MAX_TOOL_DEPTH} levels")


def _fits(value: object, most: int) -> bool:
    """Whether a JSON value has at most so many levels, without recursion."""
    levels, depth = [value], 0
    while levels and depth <= most:
        depth += 1
        levels = [
            child
            for item in levels
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth <= most


def _token_ids(tokens: pb.TokenPrompt, model: ModelLimits) -> tuple[int, ...]:
    count = len(tokens.token_ids)
    if not count:
        raise _bad("empty_prompt", "tokens.token_ids", "must not be empty")
    if count >= model.context_tokens:
        raise _too_long("tokens", f"{count} tokens", model)
    token_ids = tuple(tokens.token_ids)
    if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
        index, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < model.vocab_size)
        raise _bad(
            "bad_token_id",
            f"tokens.token_ids[{index}]",
            f"is {token}; ids of {model.name} are 0 to {model.vocab_size - 1}",
        )
    return token_ids


def _check_size(size_bytes: int, field: str, model: ModelLimits, limits: ApiConfig) -> None:
    if size_bytes > limits.max_prompt_bytes:
        raise _bad("prompt_too_large", field, f"has {size_bytes} bytes; at most {limits.max_prompt_bytes} are taken")
    if model.longest_token_bytes and size_bytes > model.most_text_bytes:
        # No need to tokenize it.
        raise _too_long(field, f"{size_bytes} bytes, with tokens of at most {model.longest_token_bytes}", model)


def _too_long(field: str, has: str, model: ModelLimits) -> InvalidInput:
    return _bad(
        "prompt_too_long",
        field,
        f"has {has}; the context of {model.name} is {model.context_tokens}, one of them for the answer",
    )


def _sampling(params: pb.SamplingParams, model: ModelLimits) -> SamplingParams:
    """All fields but max_tokens, which needs the prompt's length."""
    defaults = SamplingParams()

    def number(name: FloatField, default: float, low: float, high: float, *, open_low: bool, open_high: bool) -> float:
        value = float(getattr(params, name)) if params.HasField(name) else default
        inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
        if not math.isfinite(value) or not inside:
            left, right = "(" if open_low else "[", ")" if open_high else "]"
            raise _bad(f"bad_{name}", f"sampling_params.{name}", f"must be in {left}{low}, {high}{right}, is {value}")
        return value

    def whole(name: IntField, default: int, low: int, high: int) -> int:
        value = int(getattr(params, name)) if params.HasField(name) else default
        if not low <= value <= high:
            raise _bad(f"bad_{name}", f"sampling_params.{name}", f"must be between {low} and {high}, is {value}")
        return value

    return SamplingParams(
        temperature=number("temperature", defaults.temperature, 0.0, MAX_TEMPERATURE, open_low=False, open_high=False),
        top_p=number("top_p", defaults.top_p, 0.0, 1.0, open_low=True, open_high=False),
        top_k=whole("top_k", defaults.top_k, 0, 2**31 - 1),
        min_p=number("min_p", defaults.min_p, 0.0, 1.0, open_low=False, open_high=True),
        repetition_penalty=number(
            "repetition_penalty", defaults.repetition_penalty, 0.0, MAX_PENALTY, open_low=True, open_high=False
        ),
        seed=params.seed,
        min_tokens=whole("min_tokens", defaults.min_tokens, 0, model.context_tokens),
        stop=_stops(params),
        stop_token_ids=_stop_token_ids(params, model),
        ignore_eos=params.ignore_eos,
        logprobs=whole("logprobs", defaults.logprobs, 0, MAX_LOGPROBS) if params.HasField("logprobs") else -1,
        json_schema=_json_schema(params),
    )


def _json_schema(params: pb.SamplingParams) -> str:
    """Its form; whether it can be followed is asked of `cluster.gateway.schemas` next."""
    schema, field = params.json_schema, "sampling_params.json_schema"
    if not schema:
        return ""
    size = len(schema.encode())
    if size > MAX_SCHEMA_BYTES:
        raise _bad("bad_json_schema", field, f"has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    try:
        tree = parse_json(schema)
        fits = isinstance(tree, dict) and _fits(tree, MAX_SCHEMA_DEPTH)
    except ValueError:
        fits = False
    if not fits:
        raise _bad("bad_json_schema", field, f"must be a JSON object of at most {MAX_SCHEMA_DEPTH} levels")
    if _multiples(tree) > MAX_MULTIPLES:
        raise _bad(
            "json_schema_too_complex",
            field,
            f"has multipleOf that come to more than {MAX_MULTIPLES} together, without zeros at the end and the point",
        )
    # An answer that is whole can only end; what forbids the end would leave no token to sample.
    for name, given in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens)):
        if given:
            raise _bad(f"bad_{name}", f"sampling_params.{name}", "must be unset with a schema: a whole answer ends")
    return schema


def _multiples(tree: object) -> int:
    """The sum of the digits of every `multipleOf`, read as a whole number: 0.25 is 25, 6000 is 6. Wherever the word
    stands, also in values that are no schema."""
    total, rest = 0, [tree]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            value = item.get("multipleOf")
            if isinstance(value, int | float):
                digits = Decimal(repr(value + 0)).as_tuple().digits
                total += int("".join(map(str, digits)).rstrip("0") or 0)
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)
    return total


def _stops(params: pb.SamplingParams) -> tuple[str, ...]:
    if len(params.stop) > MAX_STOPS:
        raise _bad("too_many_stops", "sampling_params.stop", f"holds {len(params.stop)}; at most {MAX_STOPS}")
    for index, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad(
                "bad_stop",
                f"sampling_params.stop[{index}]",
                f"must have 1 to {MAX_STOP_CHARS} characters, has {len(stop)}",
            )
    return tuple(params.stop)


def _stop_token_ids(params: pb.SamplingParams, model: ModelLimits) -> tuple[int, ...]:
    if len(params.stop_token_ids) > MAX_STOPS:
        raise _bad("too_many_stops", "sampling_params.stop_token_ids", f"must hold at most {MAX_STOPS} ids")
    for index, token in enumerate(params.stop_token_ids):
        if not 0 <= token < model.vocab_size:
            raise _bad(
                "bad_token_id",
                f"sampling_params.stop_token_ids[{index}]",
                f"is {token}; ids of {model.name} are 0 to {model.vocab_size - 1}",
            )
    return tuple(params.stop_token_ids)


def _bad(reason: str, field: str, what: str) -> InvalidInput:
    return InvalidInput(reason, f"{field} {what}", field=field)
