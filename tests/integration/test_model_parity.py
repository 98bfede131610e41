"""The default model, as it is served, against transformers: logits, greedy text, token ids, chat rendering."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers import LlamaConfig as HfConfig

from kvstore.layout import KvFormat
from model.gguf_file import dequantize, open_gguf
from model.llama import LlamaModel
from model.load import load_model
from model.tokenizer import ByteLevelTokenizer, tokenizer_from_gguf
from model.weights import Weights, default_model_path, weights_from_gguf
from tests.support.dense_step import DenseStep
from tests.support.threads import one_thread

__all__ = ["one_thread"]

pytestmark = pytest.mark.slow

LOGIT_TOLERANCE = 2e-3  # fp32, 30 layers, logits up to 30: the two sum in different orders
NEW_TOKENS = 12
QUESTIONS = [
    "Name the planets of the solar system.",
    "What is two plus two?",
    "Write a haiku about rain.",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis in one sentence.",
    "List three colours.",
    "What does HTTP stand for?",
    "Translate 'good morning' into French.",
    "What is the boiling point of water?",
    "Give me a synonym of 'happy'.",
    "def fibonacci(n):",
    "How many days are in a leap year?",
    "Why is the sky blue?",
    "Tell me a short story about a fox.",
    "What is the largest ocean?",
    "Summarise: the cat sat on the mat. 🙂",
    "東京はどこですか",
    "Write one line of SQL that counts users.",
    "How do I boil an egg?",
    "Say hello in Spanish.",
]


@dataclass(frozen=True)
class Served:
    weights: Weights
    tokenizer: ByteLevelTokenizer
    exact: LlamaModel
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def served() -> Served:
    file = open_gguf(default_model_path())
    weights, tokenizer = weights_from_gguf(file), tokenizer_from_gguf(file.fields)
    exact = LlamaModel(weights, name="smollm2", tokenizer_digest=tokenizer.digest, linears="fp32")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return Served(weights, tokenizer, exact, prompts)


@pytest.fixture(scope="module")
def reference(served: Served) -> LlamaForCausalLM:
    """transformers' Llama over the same tensors. (That they are the file's is tested with the readers.)"""
    config = served.weights.config
    with torch.device("meta"):
        model = LlamaForCausalLM(
            HfConfig(
                hidden_size=config.hidden,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                intermediate_size=config.ffn,
                vocab_size=config.vocab_size,
                max_position_embeddings=config.context_tokens,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                rms_norm_eps=config.rms_eps,
                tie_word_embeddings=True,
            )
        )
    state = {**served.weights.tensors, "lm_head.weight": served.weights.tensors["model.embed_tokens.weight"]}
    model.load_state_dict(state, assign=True)
    # A buffer that no checkpoint holds.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


@pytest.fixture(scope="module")
def reference_tokenizer() -> PreTrainedTokenizerBase:
    path = default_model_path()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)


def step_of(model: LlamaModel, step: DenseStep, rows: dict[int, tuple[int, list[int]]], *, all_logits: bool) -> Tensor:
    """One packed step over {sequence: (first position, ids)}; logits of all tokens or of each row's last."""
    step.rows = [(sequence, len(ids)) for sequence, (_, ids) in rows.items()]
    ids = np.concatenate([np.array(ids, np.int64) for _, ids in rows.values()])
    positions = np.concatenate([np.arange(first, first + len(part), dtype=np.int64) for first, part in rows.values()])
    ends = np.cumsum([len(part) for _, part in rows.values()]) - 1
    return model.forward(ids, positions, np.arange(len(ids)) if all_logits else ends, step)


def greedy(model: LlamaModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """All prompts in one ragged batch."""
    step = DenseStep()
    answers: list[list[int]] = [[] for _ in prompts]
    rows = {sequence: (0, prompt) for sequence, prompt in enumerate(prompts)}
    for _ in range(tokens):
        best = step_of(model, step, rows, all_logits=False).argmax(-1).tolist()
        for sequence, token in enumerate(best):
            answers[sequence].append(token)
        rows = {
            sequence: (len(prompts[sequence]) + len(answer) - 1, answer[-1:]) for sequence, answer in enumerate(answers)
        }
    return answers


def test_the_file_decodes_as_the_reference_library_decodes_it() -> None:
    file = open_gguf(default_model_path())
    reader = gguf.GGUFReader(default_model_path())
    for tensor in reader.tensors[1:30]:
        ours = dequantize(file.tensors[tensor.name])
        np.testing.assert_array_equal(ours, gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_greedy_text_and_logits_equal_transformers(served: Served, reference: LlamaForCausalLM) -> None:
    """Every token that we chose, batched and step by step, is the one transformers prefers over the whole text."""
    answers = greedy(served.exact, served.prompts, NEW_TOKENS)
    for number, (prompt, answer) in enumerate(zip(served.prompts, answers, strict=True)):
        whole = prompt + answer[:-1]
        compared = number < 4
        with torch.inference_mode():
            theirs = reference(torch.tensor([whole]), logits_to_keep=0 if compared else NEW_TOKENS).logits[0]
        if compared:
            ours = step_of(served.exact, DenseStep(), {0: (0, whole)}, all_logits=True)
            torch.testing.assert_close(ours, theirs, atol=LOGIT_TOLERANCE, rtol=0)
        tail = theirs[-NEW_TOKENS:]
        best = tail.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 2 * LOGIT_TOLERANCE, "a near-tie: choose another question"
        assert tail.argmax(-1).tolist() == answer


def test_it_knows_english(served: Served) -> None:
    """Rows in a wrong order or a wrong rotation would leave a model that agrees with itself and knows nothing."""
    text = "The capital of France is Paris, and the capital of Italy is Rome. The sun rises in the east."
    ids = served.tokenizer.encode(text)
    logits = step_of(served.exact, DenseStep(), {0: (0, ids)}, all_logits=True)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    assert loss < 2.5


def test_fp16_linears_against_fp32(served: Served) -> None:
    """Stated bounds, over six prompts' tokens: KL at most 2e-5 a token, the same best token at 99 % of them."""
    half = LlamaModel(served.weights, name="smollm2", tokenizer_digest="", linears="fp16")
    rows = {sequence: (0, prompt) for sequence, prompt in enumerate(served.prompts[:6])}
    a, b = (step_of(model, DenseStep(), rows, all_logits=True) for model in (served.exact, half))
    a_log, b_log = a.log_softmax(-1), b.log_softmax(-1)
    kl = (a_log.exp() * (a_log - b_log)).sum(-1).mean()
    assert 0 < kl < 2e-5
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() >= 0.99


TRICKY = [
    "Hello world",
    "  two  spaces\t\ttabs \n\n\n newlines\r\n",
    "naïve café — “quotes” …",
    "東京で寿司を食べた。中文字符",
    "🙂🚀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷",
    "def f(x):\n    return {**x, 'a': [1, 2.5e-3]}  # 日本",
    "12345 3.14159 1,000,000",
    "don't we'll I'M THEY'RE",
    "हिन्दी العربية עברית ไทย",
    "a<|im_end|>b <|endoftext|>",
]


@pytest.mark.parametrize("text", [*TRICKY, *QUESTIONS[:5]])
def test_token_ids_equal_transformers(text: str, served: Served, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    """Without vulgar fractions: transformers' conversion of this file leaves out the rule that splits digits, which
    the model's own tokenizer has, and only those show it."""
    theirs = reference_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert served.tokenizer.encode(text, allow_special=True) == theirs
    assert served.tokenizer.decode(theirs, skip_special=False) == reference_tokenizer.decode(theirs)


def test_chat_renders_as_transformers_renders_it(served: Served, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    chats = [
        [{"role": "user", "content": "  hi\n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ç🙂"}],
    ]
    for chat in chats:
        for prompt in (True, False):
            theirs = reference_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert served.tokenizer.render_chat(chat, add_generation_prompt=prompt) == theirs


def test_loading_by_name_gives_the_served_model(served: Served) -> None:
    model, tokenizer = load_model("smollm2", linears="auto")
    assert model.info.name == "smollm2-135m-instruct"
    assert model.info.revision == served.weights.revision
    assert model.info.tokenizer_digest == tokenizer.digest == served.tokenizer.digest
    assert (model.info.vocab_size, model.info.context_tokens, model.info.eos_token_ids) == (49_152, 8192, (2,))
    layout = model.layout(32, KvFormat.INT8)
    assert (layout.layers, layout.kv_heads, layout.key_width) == (30, 3, 64)
    assert served.weights.revision in layout.model
