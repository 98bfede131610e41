"""Triton kernels under the interpreter or on a GPU: the digest, and elements that the CPU backend does not serve."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from kvstore.digest import Digester
from kvstore.digest_triton import TritonDigester
from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES, KvFormat
from kvstore.tables import FLAG_NONFINITE
from model.attention.gpu import TritonBackend
from model.attention.reference import ReferenceBackend
from tests.unit.attention_cases import SCALE, gqa, make_case, poison

CPU = torch.device("cpu")


@pytest.mark.parametrize("slot_bytes", [192, HEADER_BYTES + 8 * 1024, HEADER_BYTES + 8 * 1024 + 64])
def test_a_gpu_sums_pages_to_the_same_values(slot_bytes: int) -> None:
    storage = np.random.default_rng(1).integers(0, 256, (4, slot_bytes), dtype=np.uint8)
    storage[3] = 255
    digester = Digester(bytes(range(16)), slot_bytes)
    ids = np.array([3, 0, 2])
    sums = TritonDigester(digester, CPU).body_sums_many(torch.from_numpy(storage), torch.from_numpy(ids))
    assert (sums.numpy().view(np.uint64) == digester.body_sums_many(storage, ids)).all()
    digest = digester.finish(sums.numpy().view(np.uint64)[1], storage[0, :HEADER_BYTES].tobytes())
    assert digest == digester.digest(storage[0])


def test_the_digest_refuses_other_storage() -> None:
    digester = TritonDigester(Digester(bytes(16), 192), CPU)
    for bad in (torch.zeros(2, 256, dtype=torch.uint8), torch.zeros(2, 192), torch.zeros(192, dtype=torch.uint8)):
        with pytest.raises(InvalidInput) as caught:
            digester.body_sums_many(bad, torch.zeros(1, dtype=torch.int64))
        assert caught.value.field == "storage"


@pytest.mark.parametrize("element", ["fp16", "bf16"])
def test_short_elements(element: str) -> None:
    layout = gqa(kv_format=KvFormat.NONE, element=element)
    case = make_case(layout, [1, 11], [9, 11])
    backend, reference = TritonBackend(layout), ReferenceBackend(layout)
    backend.write(0, case.streams, case.history)
    stored = case.read.storage_SU8.copy()
    poison(layout, case.read.storage_SU8)
    reference.write(0, case.streams, case.history)
    assert (stored == case.read.storage_SU8).all()
    out = backend.attend(0, case.query_NHD, case.read, SCALE)
    torch.testing.assert_close(out, reference.attend(0, case.query_NHD, case.read, SCALE), rtol=2e-5, atol=2e-5)
    case.streams[0][0, 0, 0] = 3.4e38  # rounds to infinity in either element
    backend.write(0, case.streams, case.history)
    assert case.flags == [FLAG_NONFINITE, 0]
