"""The reference backend against dense attention, for the kinds and elements that only it serves."""

from __future__ import annotations

import pytest
import torch

from kvstore.layout import KvFormat, PageLayout
from kvstore.tables import FLAG_KERNEL_READ
from model.attention.reference import ReferenceBackend
from tests.unit.attention_cases import SCALE, dense_attention, gqa, make_case, mla


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        (mla(kv_format=KvFormat.NONE), 1e-5),
        (mla(), 0.05),
        (gqa(kv_format=KvFormat.NONE), 1e-5),
        (gqa(kv_format=KvFormat.NONE, element="fp16"), 5e-3),
        (gqa(kv_format=KvFormat.NONE, element="bf16"), 4e-2),
        (gqa(1, 4, 12), 0.05),
    ],
)
def test_it_attends_as_a_dense_softmax_does(layout: PageLayout, tolerance: float) -> None:
    case = make_case(layout, [1, 5, 17], [16, 9, 17], group=3)
    backend = ReferenceBackend(layout)
    backend.write(0, case.streams, case.history)
    out = backend.attend(0, case.query_NHD, case.read, SCALE)
    assert not any(case.flags)
    torch.testing.assert_close(out, dense_attention(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("word", [0, 1])
def test_mla_pages_are_checked_too(word: int) -> None:
    case = make_case(mla(), [1, 1], [17, 17])
    backend = ReferenceBackend(case.layout)
    backend.write(0, case.streams, case.history)
    healthy = backend.attend(0, case.query_NHD, case.read, SCALE)
    slot = case.read.page_ids_BP[1, 1]
    case.read.live_S2[slot, word] -= 1
    case.read.storage_SU8[slot] = 255
    out = backend.attend(0, case.query_NHD, case.read, SCALE)
    assert case.flags == [0, FLAG_KERNEL_READ]
    assert torch.equal(out[0], healthy[0])
    assert (out[1] == 0).all()
