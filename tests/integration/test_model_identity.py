"""The identity that the gateway reads is the one that workers load: else every ticket would be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidInput
from model.load import load_identity, load_model


@pytest.mark.parametrize("spec", ["smollm2", "probe"])
def test_identity_is_that_of_the_loaded_model(spec: str):
    model, tokenizer = load_model(spec)
    info, own = load_identity(spec)
    assert info == model.info
    assert own.digest == tokenizer.digest == info.tokenizer_digest
    assert own.encode("Hello, world") == tokenizer.encode("Hello, world")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInput) as caught:
        load_identity(str(tmp_path / "none.gguf"))
    assert caught.value.reason == "unknown_model"
