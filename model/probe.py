"""The probe model: a small Llama whose answer spells what stands in the KV pages that it reads.

Its next token after position p is the token at position p + 1 - L (L = 64 unless said otherwise). A prompt of at least
L tokens is answered with its own last L tokens, over and over, each read through the cached keys and values at its
place; a foreign, short, stale or altered page there, or one of other positions, shows in the text. (Rows that only
change places, keys with values, are no damage to any model of this family: a key carries its position.) Before position
L - 1 it repeats the token that it was just given. It runs through the same code as every other model; only its weights
are made by hand:

- The embedding of a token is its code, 128 signs from a hash, and a constant.
- Queries and keys come from the constant alone, so that a score depends on distance alone, through RoPE. With all keys
  equal, score(d) = peak * (f(d - (L - 1)) + s * f(d)) for f(d) = mean over the frequencies w of cos(w d): the highest
  peak at distance L - 1, a second, slightly lower one at distance 0, and all others far below. theta = 4 keeps the
  frequencies high and apart. The gaps are tens of nats: the softmax is one-hot, also with int8 keys.
- Values carry the code: the first KV head its first half, the second the rest; all four query heads bring it back.
- The output reads the code from other channels. A whole code wins by 128 to 127.5 against the token `<|corrupt|>`,
  which a constant speaks for: one value among the 128 that lost its sign, or only became small, and the answer is
  `<|corrupt|>`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.errors import InvalidInput
from model.chat_template import ChatTemplate
from model.config import LlamaConfig
from model.llama import LlamaModel, rope_frequencies
from model.tokenizer import ByteLevelTokenizer, Control, byte_tokenizer
from model.weights import Weights, expected_shapes, revision_of

DEFAULT_LAG_TOKENS = 64
MAX_LAG_TOKENS = 512
CONTEXT_TOKENS = 2048
EOS_ID, START_ID, END_ID, CORRUPT_ID = 256, 257, 258, 259
_SPECIALS = ("<|eos|>", "<|im_start|>", "<|im_end|>", "<|corrupt|>")

_CODE = 128  # signs of a token's code
_CONSTANT = _CODE  # channel of the constant
_OUTPUT = _CODE + 8  # first output channel
_HIDDEN = _OUTPUT + _CODE
_THETA = 4.0
_PEAK_NATS = 800.0
_SELF_SHARE = 0.97  # height of the second peak
_FIRST_GAP_NATS, _SECOND_GAP_NATS = 18.0, 60.0
_HEAD_GAIN = 32.0  # 16 nats for half a sign, so that sampling at temperature 1 answers as greedy does

_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_probe(
    *, lag_tokens: int = DEFAULT_LAG_TOKENS, linears: str = "fp32"
) -> tuple[LlamaModel, ByteLevelTokenizer]:
    """Returns the model and its byte tokenizer.

    Raises InvalidInput (field `lag_tokens`) outside [2, 512], and for a lag whose two peaks do not stand well above all
    other distances of the context. 16, 32, 48, 64, 96 and 128 are good.
    """
    if not 2 <= lag_tokens <= MAX_LAG_TOKENS:
        raise InvalidInput("bad_probe", f"lag_tokens must be in [2, {MAX_LAG_TOKENS}]", field="lag_tokens")
    nats = distance_nats(np.arange(CONTEXT_TOKENS), lag_tokens)
    first, second = nats[lag_tokens - 1], nats[0]
    if first - second < _FIRST_GAP_NATS or second - np.delete(nats, [0, lag_tokens - 1]).max() < _SECOND_GAP_NATS:
        raise InvalidInput("bad_probe", f"at lag {lag_tokens} attention would not be sharp", field="lag_tokens")
    tokenizer = probe_tokenizer()
    weights = probe_weights(lag_tokens)
    model = LlamaModel(weights, name="probe", tokenizer_digest=tokenizer.digest, linears=linears)
    return model, tokenizer


def echo_of(prompt_ids: Sequence[int], tokens: int, lag_tokens: int = DEFAULT_LAG_TOKENS) -> list[int]:
    """What the probe generates greedily after a prompt, were it not to stop at `<|eos|>`."""
    ids = list(prompt_ids)
    for _ in range(tokens):
        ids.append(ids[-lag_tokens] if len(ids) >= lag_tokens else ids[-1])
    return ids[len(prompt_ids) :]


def probe_tokenizer() -> ByteLevelTokenizer:
    """One token a byte, then `<|eos|>`, `<|im_start|>`, `<|im_end|>`, and `<|corrupt|>`, which shows in text."""
    controls = {text: Control(256 + index, text != "<|corrupt|>") for index, text in enumerate(_SPECIALS)}
    template = ChatTemplate(_TEMPLATE, tuple(controls), eos_token="<|eos|>")
    return byte_tokenizer(controls, (EOS_ID,), template)


def probe_config() -> LlamaConfig:
    return LlamaConfig(
        hidden=_HIDDEN,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=8,
        vocab_size=256 + len(_SPECIALS),
        context_tokens=CONTEXT_TOKENS,
        rope_theta=_THETA,
        rms_eps=1e-6,
        tie_embeddings=False,
        eos_token_ids=(EOS_ID,),
    )


def probe_weights(lag_tokens: int) -> Weights:
    """The weights, the same on every machine up to the rounding of sine and cosine."""
    config = probe_config()
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    layer = "model.layers.0."
    codes = torch.from_numpy(token_codes(config.vocab_size))
    for name in ("model.norm.weight", layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"):
        tensors[name] += 1
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, :_CODE] = codes
    embedding[:, _CONSTANT] = 1
    # RMSNorm divides every embedding by the same number, which the projections multiply back.
    undo = math.sqrt((_CODE + 1) / _HIDDEN + config.rms_eps)
    width = config.head_dim
    query, key = tensors[layer + "self_attn.q_proj.weight"], tensors[layer + "self_attn.k_proj.weight"]
    query[:, _CONSTANT] = undo * _query(config, lag_tokens).repeat(config.heads)
    key[:, _CONSTANT] = undo * _key(config).repeat(config.kv_heads)
    tensors[layer + "self_attn.v_proj.weight"][:, :_CODE] = undo * torch.eye(_CODE)
    output = tensors[layer + "self_attn.o_proj.weight"]
    shared = config.heads // config.kv_heads
    for head in range(config.heads):
        channel = _OUTPUT + head // shared * width
        output[channel : channel + width, head * width : (head + 1) * width] = torch.eye(width) / shared
    tensors["lm_head.weight"][:, _OUTPUT:] = _HEAD_GAIN * codes
    tensors["lm_head.weight"][CORRUPT_ID] = 0
    tensors["lm_head.weight"][CORRUPT_ID, _CONSTANT] = _HEAD_GAIN * (_CODE - 0.5)
    # Of the recipe and not of the bytes: another machine's sine may round differently, and is the same model.
    recipe = f"probe 1: lag {lag_tokens}, peak {_PEAK_NATS}, second {_SELF_SHARE}, gain {_HEAD_GAIN}"
    return Weights(config, tensors, revision_of(config, [recipe]))


def token_codes(tokens: int) -> npt.NDArray[np.float32]:
    """Codes [tokens, 128] of signs from SHAKE-256. No two agree in more than 96 of their signs, as a test holds."""
    bits = b"".join(hashlib.shake_256(b"genlock probe %d" % token).digest(_CODE // 8) for token in range(tokens))
    signs = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(tokens, _CODE)
    return signs.astype(np.float32) * 2 - 1


def distance_nats(distances: npt.NDArray[np.int64], lag_tokens: int = DEFAULT_LAG_TOKENS) -> npt.NDArray[np.float64]:
    """The attention score of a key at each distance from the query, in nats, as the formula above gives it."""
    frequency = rope_frequencies(probe_config()).double().numpy()

    def mean_cosine(distance: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.asarray(np.cos(np.multiply.outer(distance, frequency)).mean(-1), np.float64)

    share = mean_cosine(distances - (lag_tokens - 1)) + _SELF_SHARE * mean_cosine(distances)
    return share * _PEAK_NATS


def _key(config: LlamaConfig) -> Tensor:
    """Before rotation every frequency's pair is (1, 0): halves of ones and zeros."""
    half = config.head_dim // 2
    return torch.cat([torch.ones(half), torch.zeros(half)])


def _query(config: LlamaConfig, lag_tokens: int) -> Tensor:
    """A sum of two keys, one turned back by L - 1 positions, scaled so that the scores are nats."""
    angle = rope_frequencies(config).double() * -(lag_tokens - 1)
    back = torch.cat([angle.cos(), angle.sin()])
    here = torch.cat([torch.ones_like(angle), torch.zeros_like(angle)])
    amplitude = _PEAK_NATS * math.sqrt(config.head_dim) / (config.head_dim // 2)
    return (amplitude * (back + _SELF_SHARE * here)).float()
