"""Byte-level BPE tokenizers, from GGUF fields or an HF `tokenizer.json`, and the incremental detokenizer.

Control tokens (`<|im_end|>` and the like) are split off here and never reach the BPE: text that a user wrote cannot
become one. Decoding works on bytes, so that a stream and a whole decode agree at every cut.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from kvstore.errors import InvalidInput
from kvstore.files import FileReader
from model.base import TextStream
from model.chat_template import ChatTemplate, RenderedChat, any_of
from model.hf_folder import read_json

MAX_TEXT_CHARS = 8 << 20
# Longer texts are encoded without holding the interpreter.
MAX_HELD_CHARS = 2048
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
# Splitting rules of `tokenizer.ggml.pre`: the Llama 3 and Qwen 2 patterns are those of their tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": f"{_CONTRACTIONS}|" + _WORDS % r"\p{N}{1,3}",
    "qwen2": f"{_CONTRACTIONS}|" + _WORDS % r"\p{N}",
}


@dataclass(frozen=True)
class Control:
    """A control token: its id, and whether it is left out of decoded text."""

    token_id: int
    hidden: bool


@dataclass(frozen=True)
class ByteLevelTokenizer:
    """Implements `Tokenizer`. `plain` encodes text and knows no control token; `token_bytes` holds each id's bytes.

    `digest` covers vocabulary, merges, splitting rules, control tokens and added tokens; not the chat template, whose
    effect is in the token ids.
    """

    plain: Tokenizer
    token_bytes: tuple[bytes, ...]
    controls: Mapping[str, Control]
    prefix_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    template: ChatTemplate
    digest: str
    hidden_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        hidden = frozenset(control.token_id for control in self.controls.values() if control.hidden)
        object.__setattr__(self, "hidden_ids", hidden)

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        return frozenset(control.token_id for control in self.controls.values())

    def encode(self, text: str, *, add_special: bool = False, allow_special: bool = False) -> list[int]:
        """See `Tokenizer.encode`. Raises InvalidInput (field `prompt`): `text_too_long`, `bad_text`."""
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidInput("text_too_long", f"text is over {MAX_TEXT_CHARS} characters", field="prompt")
        ids = list(self.prefix_ids) if add_special else []
        if allow_special and self._controls is not None:
            return ids + self._encode_split(text, self._controls)
        return ids + self._encode_plain(text)

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model; one that cannot be compiled shows nothing."""
        try:
            return self.template.takes_tools
        except InvalidInput:
            return False

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        chat = self.template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        if self._controls is None:
            return self._encode_plain(chat.text)
        return self._encode_split(chat.marked, self._controls, chat)

    def _encode_split(self, text: str, controls: re.Pattern[str], chat: RenderedChat | None = None) -> list[int]:
        """Control markers become their ids, except those that `chat` marks as a user's words."""
        ids: list[int] = []
        plain: list[str] = []
        at = 0
        for match in controls.finditer(text):
            start, end = match.span()
            plain.append(text[at:start])
            if chat and text.endswith(chat.mark, at, start):
                plain.append(match.group())
            else:
                ids += self._encode_parts(plain, chat)
                ids.append(self.controls[match.group()].token_id)
                plain = []
            at = end
        plain.append(text[at:])
        return ids + self._encode_parts(plain, chat)

    def _encode_parts(self, parts: Sequence[str], chat: RenderedChat | None) -> list[int]:
        text = "".join(parts)
        if chat:
            text = text.replace(chat.mark, "")
        return self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            if len(text) > MAX_HELD_CHARS:
                # As a batch of one: only so does the library let other threads run meanwhile.
                return list(self.plain.encode_batch([text], add_special_tokens=False)[0].ids)
            return list(self.plain.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidInput("bad_text", f"text is not valid Unicode: {error}", field="prompt") from error

    @cached_property
    def _controls(self) -> re.Pattern[str] | None:
        return any_of(tuple(self.controls))

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Ids to text; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        hidden = self.hidden_ids if skip_special else frozenset()
        return b"".join(self.bytes_of(token) for token in token_ids if token not in hidden).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; b"" for an id outside the vocabulary."""
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""

    def token_text(self, token_id: int) -> str:
        r"""One token as text; a part of a character shows its bytes as `\xNN`."""
        return self.bytes_of(token_id).decode("utf-8", "backslashreplace")

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """See `Tokenizer.render_chat`."""
        return self.template.render(messages, add_generation_prompt=add_generation_prompt).text

    def stream(self) -> TextStream:
        return Utf8Stream(self)


class Utf8Stream:
    """Implements `TextStream`: the pieces of any cut, joined, are what `decode` returns for the whole."""

    def __init__(self, tokenizer: ByteLevelTokenizer) -> None:
        self._hidden_ids = tokenizer.hidden_ids
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether the decoder holds a part of a character.
        self._holds = False

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        data = self._bytes_of(token_id)
        if not self._holds:
            try:
                return data.decode()  # nearly every token is whole characters, and this is the short way for those
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def tokenizer_from_gguf(fields: Mapping[str, object]) -> ByteLevelTokenizer:
    """From `tokenizer.ggml.*` of a GGUF file. Raises InvalidInput naming the field that is not supported."""
    kind, pre = fields.get("tokenizer.ggml.model"), str(fields.get("tokenizer.ggml.pre", "gpt-2"))
    if kind != "gpt2":
        raise _unsupported("tokenizer.ggml.model", kind)
    tokens, types = _strings(fields, "tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    merges = _strings(fields, "tokenizer.ggml.merges")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [1] * len(tokens)
    controls = {
        text: Control(index, kind == _GGUF_CONTROL)
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _GGUF_CONTROL or (kind == _GGUF_USER_DEFINED and _looks_like_marker(text))
    }
    vocab = {text: index for index, text in enumerate(tokens) if text not in controls}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        plain = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exceptions for inconsistent merges
        raise InvalidInput("bad_tokenizer", f"tokenizer.ggml: {error}", field="tokenizer.ggml.merges") from error
    plain.pre_tokenizer = _gguf_splitting(pre)
    words = [text for text, kind in zip(tokens, types, strict=True) if kind == _GGUF_USER_DEFINED]
    plain.add_tokens([AddedToken(text, normalized=False) for text in words if text not in controls])
    bos, eos = (_token_id(fields, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos"))
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and bos is not None
    rules = json.dumps([tokens, types, merges, pre, bos if adds_bos else None])
    return ByteLevelTokenizer(
        plain=plain,
        token_bytes=tuple(_gguf_bytes(text, kind) for text, kind in zip(tokens, types, strict=True)),
        controls=controls,
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        eos_token_ids=() if eos is None else (eos,),
        template=ChatTemplate(
            source=str(fields.get("tokenizer.chat_template", "")),
            control_markers=tuple(controls),
            bos_token="" if bos is None else tokens[bos],
            eos_token="" if eos is None else tokens[eos],
        ),
        digest=_digest(rules),
    )


def byte_tokenizer(
    controls: Mapping[str, Control], eos_token_ids: tuple[int, ...], template: ChatTemplate
) -> ByteLevelTokenizer:
    """One token a byte, whose id is the byte; the controls' ids follow, from 256 without a gap."""
    plain = Tokenizer(models.BPE(vocab=_BYTE_OF, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_id = sorted((control.token_id, text) for text, control in controls.items())
    return ByteLevelTokenizer(
        plain=plain,
        token_bytes=(*(bytes([byte]) for byte in range(256)), *(text.encode() for _, text in by_id)),
        controls=controls,
        prefix_ids=(),
        eos_token_ids=eos_token_ids,
        template=template,
        digest=_digest(json.dumps(["bytes", by_id])),
    )


def _gguf_splitting(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise _unsupported("tokenizer.ggml.pre", pre)


def tokenizer_from_folder(folder: Path, eos_token_ids: tuple[int, ...]) -> ByteLevelTokenizer:
    """From `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of an HF folder.

    `eos_token_ids` come from the model's config. Raises InvalidInput naming the part that is not supported.
    """
    raw = read_json(folder / "tokenizer.json")
    settings = read_json(folder / "tokenizer_config.json", required=False)
    added = _added_tokens(raw)
    controls = {
        str(token["content"]): Control(int(str(token["id"])), bool(token.get("special")))
        for token in added
        if token.get("special") or _looks_like_marker(str(token["content"]))
    }
    for token in added:
        if token["content"] in controls and any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise _unsupported("added_tokens", f"{token['content']!r} with lstrip, rstrip or single_word")
    if '"ByteLevel"' not in json.dumps([raw.get("decoder"), raw.get("pre_tokenizer")]):
        raise _unsupported("tokenizer.json", "not byte-level")
    whole = _parse(raw)
    prefix = whole.encode("").ids
    plain = _parse(_without_controls(raw, controls))
    size = 1 + max(whole.get_vocab(with_added_tokens=True).values())
    literal = {int(str(token["id"])): str(token["content"]).encode() for token in added}
    tokens = (literal.get(index, whole.id_to_token(index)) for index in range(size))
    template = settings.get("chat_template", "")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), "")
    if (folder / "chat_template.jinja").is_file():
        template = FileReader("bad_model_folder", "model").text(folder / "chat_template.jinja")
    return ByteLevelTokenizer(
        plain=plain,
        token_bytes=tuple(item if isinstance(item, bytes) else _byte_level(item or "") for item in tokens),
        controls=controls,
        prefix_ids=tuple(prefix),
        eos_token_ids=eos_token_ids,
        template=ChatTemplate(
            source=str(template or ""),
            control_markers=tuple(controls),
            bos_token=_text_of(settings.get("bos_token")),
            eos_token=_text_of(settings.get("eos_token")),
        ),
        digest=_digest(json.dumps(raw, sort_keys=True)),
    )


def _parse(raw: Mapping[str, object]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(raw))
    except Exception as error:  # the library raises bare Exceptions
        raise InvalidInput("bad_tokenizer", f"tokenizer.json: {error}", field="tokenizer.json") from error


def _added_tokens(raw: Mapping[str, object]) -> list[dict[str, object]]:
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(item, dict) and "content" in item for item in added):
        raise _unsupported("added_tokens", "not a list of tokens")
    return added


def _without_controls(raw: Mapping[str, object], controls: Mapping[str, Control]) -> dict[str, object]:
    """The same tokenizer, unable to produce a control token: neither as an added token nor from its vocabulary."""
    model = raw.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or model.get("type", "BPE") != "BPE":
        raise _unsupported("tokenizer.json", "its model is not BPE")
    vocab = {text: index for text, index in model["vocab"].items() if text not in controls}
    added = [token for token in _added_tokens(raw) if token["content"] not in controls]
    # The library numbers added tokens anew unless the vocabulary already holds them.
    vocab |= {str(token["content"]): token["id"] for token in added}
    return {**raw, "model": {**model, "vocab": vocab}, "added_tokens": added, "post_processor": None}


def _looks_like_marker(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def _strings(fields: Mapping[str, object], name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _unsupported(name, "not a list of texts")
    return value


def _token_id(fields: Mapping[str, object], name: str, vocab_size: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise _unsupported(name, value)
    return value


def _text_of(value: object) -> str:
    """A token in tokenizer_config.json is a text or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _unsupported(name: str, value: object) -> InvalidInput:
    return InvalidInput("unsupported_tokenizer", f"{name}: {value!r} is not supported", field=name)


def _digest(rules: str) -> str:
    return hashlib.blake2b(rules.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _gguf_bytes(text: str, kind: int) -> bytes:
    return text.encode() if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED) else _byte_level(text)


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest is shifted past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level(text: str) -> bytes:
    """A vocabulary entry to the bytes it stands for; an entry outside the alphabet stands for its own characters."""
    try:
        return bytes([_BYTE_OF[char] for char in text])
    except KeyError:
        return text.encode()
