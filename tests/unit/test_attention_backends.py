"""One contract for every attention backend: right numbers, and never a byte of a page that is not the row's own.

Under TRITON_INTERPRET=1 (see test_attention_triton.py) the Triton backend runs these tests instead of the others.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import formats
from kvstore.errors import InvalidInput
from kvstore.layout import KvFormat, PageLayout
from kvstore.tables import FLAG_ENTRY, FLAG_KERNEL_READ, FLAG_KERNEL_WRITE, FLAG_NONFINITE
from model.attention.base import PagedStep
from model.attention.reference import ReferenceBackend
from model.attention.select import make_backend
from tests.unit.attention_cases import SCALE, Case, dense_attention, gqa, make_case, mla, poison

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", "cpu"]
EXAMPLES, ROWS, LONGEST = (4, 2, 17) if INTERPRETED else (40, 4, 33)
FORMATS = [KvFormat.INT8, KvFormat.NONE]

every_backend = pytest.mark.parametrize("name", BACKENDS)
every_format = pytest.mark.parametrize("kv_format", FORMATS)


def run(name: str, case: Case) -> torch.Tensor:
    """Writes the history and attends, layer 1."""
    backend = make_backend(name, case.layout)
    # Interpreted writes are slow, and other tests show that they store the same bytes.
    (ReferenceBackend(case.layout) if INTERPRETED else backend).write(1, case.streams, case.history)
    return backend.attend(1, case.query_NHD, case.read, SCALE)


def attend(name: str, case: Case) -> torch.Tensor:
    return make_backend(name, case.layout).attend(1, case.query_NHD, case.read, SCALE)


def mixed(layout: PageLayout, seed: int = 0) -> Case:
    """Decode rows, a row of a few tokens, a long row with a prefix and one without; page counts around whole pages."""
    t = layout.page_tokens
    return make_case(layout, [1, 1, 3, 9, 11, 1], [t, t + 1, 2 * t - 1, 3 * t + 1, 11, 1], seed=seed)


@every_backend
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), kv_format=st.sampled_from(FORMATS), seed=st.integers(0, 1000))
def test_any_ragged_step_agrees_with_the_reference(
    name: str, data: st.DataObject, kv_format: KvFormat, seed: int
) -> None:
    widths = st.sampled_from([4, 8, 20])
    layout = gqa(
        data.draw(st.integers(1, 3)),
        data.draw(widths),
        data.draw(widths),
        data.draw(st.sampled_from([4, 8])),
        kv_format,
    )
    contexts = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=ROWS))
    new = [data.draw(st.integers(0, context)) for context in contexts]
    case = make_case(layout, new, contexts, group=data.draw(st.integers(1, 4)), seed=seed)
    make_backend(name, layout).write(1, case.streams, case.history)
    out = attend(name, case)
    stored = case.read.storage_SU8.copy()
    poison(layout, case.read.storage_SU8)
    expected = run("reference", case)
    assert (case.read.storage_SU8 == stored).all(), "both backends store the same bytes"
    assert not any(case.flags)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@every_backend
@every_format
def test_a_mixed_step_is_right(name: str, kv_format: KvFormat) -> None:
    case = mixed(gqa(kv_format=kv_format))
    out = run(name, case)
    tolerance = 0.05 if kv_format is KvFormat.INT8 else 2e-5
    torch.testing.assert_close(out, dense_attention(case), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, run("reference", case), rtol=2e-5, atol=2e-5)
    assert case.flags == [0] * 6


@every_backend
def test_every_byte_outside_the_rows_is_left_alone(name: str) -> None:
    case = mixed(gqa())
    clean = case.read.storage_SU8.copy()
    make_backend(name, case.layout).write(1, case.streams, case.history)
    touched = (case.read.storage_SU8 != clean).any(axis=1)
    assert not touched[case.spare_slots()].any()
    assert (formats.code_view(case.layout, case.read.storage_SU8, 0, 0) == 127).all(), "the other layer"
    scales = formats.scale_view(case.layout, case.read.storage_SU8, 1, 1)
    assert int(np.isfinite(scales).sum()) == sum(case.contexts) * case.layout.kv_heads


def stale_places(case: Case) -> list[tuple[int, int]]:
    return [(row, page) for row, context in enumerate(case.contexts) for page in range(case.layout.pages_for(context))]


@every_backend
@every_format
@pytest.mark.parametrize("word", [0, 1], ids=["incarnation", "generation"])
def test_a_stale_page_anywhere_costs_its_row_and_no_other(name: str, kv_format: KvFormat, word: int) -> None:
    case = mixed(gqa(kv_format=kv_format))
    healthy = run(name, case)
    places = stale_places(case)
    for row, page in places[:: 5 if INTERPRETED else 1]:
        slot = int(case.read.page_ids_BP[row, page])
        kept, tag = case.read.storage_SU8[slot].copy(), int(case.read.live_S2[slot, word])
        case.read.live_S2[slot, word] += 1
        case.read.storage_SU8[slot] = 255  # NaN in every float: one byte of it would show
        case.read.flags_B[:] = 0
        out = attend(name, case)
        assert case.flags == [FLAG_KERNEL_READ if b == row else 0 for b in range(6)], (row, page)
        for other in range(6):
            at = case.tokens_of(other)
            if other == row:
                assert (out[at] == 0).all(), (row, page)
            else:
                assert torch.equal(out[at], healthy[at]), (row, page, other)
        case.read.storage_SU8[slot] = kept
        case.read.live_S2[slot, word] = tag


@every_backend
@every_format
@pytest.mark.parametrize("row", [1, 3], ids=["decode", "prefill"])
def test_without_the_check_the_foreign_page_would_be_read(name: str, kv_format: KvFormat, row: int) -> None:
    case = mixed(gqa(kv_format=kv_format))
    healthy = run(name, case)
    case.read.live_S2[case.read.page_ids_BP[row, 0]] += 1
    case.read.storage_SU8[case.read.page_ids_BP[row, 0]] = 255
    unchecked = attend(name, case.without_checks())
    assert case.flags == [0] * 6
    assert not torch.equal(unchecked[case.tokens_of(row)], healthy[case.tokens_of(row)])


@every_backend
def test_the_checks_switch_changes_nothing_else(name: str) -> None:
    case = mixed(gqa())
    checked = run(name, case)
    assert torch.equal(checked, attend(name, case.without_checks()))


@every_backend
@pytest.mark.parametrize("row", [1, 4], ids=["decode", "prefill"])
def test_a_flagged_row_is_skipped_and_keeps_its_flag(name: str, row: int) -> None:
    case = mixed(gqa())
    healthy = run(name, case)
    case.read.flags_B[row] = FLAG_ENTRY
    case.read.live_S2[case.read.page_ids_BP[row, 0]] += 1
    out = attend(name, case)
    assert case.flags == [FLAG_ENTRY if b == row else 0 for b in range(6)]
    assert (out[case.tokens_of(row)] == 0).all()
    case.read.flags_B[:] = 0
    keep = torch.ones(out.shape[0], dtype=torch.bool)
    keep[case.tokens_of(row)] = False
    assert torch.equal(out[keep], healthy[keep])


@every_backend
@pytest.mark.parametrize("row", [1, 3], ids=["decode", "prefill"])
@pytest.mark.parametrize("page_id", [-1, 10_000, np.iinfo(np.int32).max, np.iinfo(np.int32).min])
def test_a_page_id_outside_the_pool_is_a_stale_page(name: str, row: int, page_id: int) -> None:
    case = mixed(gqa())
    run(name, case)
    case.read.page_ids_BP[row, 1] = page_id
    for checked in (case, case.without_checks()):
        case.read.flags_B[:] = 0
        out = attend(name, checked)
        assert case.flags == [FLAG_KERNEL_READ if b == row else 0 for b in range(6)]
        assert (out[case.tokens_of(row)] == 0).all()


@every_backend
@pytest.mark.parametrize("new", [1, 20], ids=["decode", "prefill"])
def test_a_context_longer_than_the_table_is_a_stale_page(name: str, new: int) -> None:
    """One page further in the table is the next row's first page, with a tag that matches."""
    case = make_case(gqa(), [new, 1], [24, 24])
    healthy = run(name, case)
    case.read.context_len_B[0] = 25
    case.read.position_N[new - 1] = 24
    out = attend(name, case)
    assert case.flags == [FLAG_KERNEL_READ, 0]
    assert (out[:new] == 0).all()
    assert torch.equal(out[new:], healthy[new:])
    case.read.flags_B[0] = FLAG_ENTRY
    attend(name, case)
    assert case.flags == [FLAG_ENTRY, 0]


@every_backend
@every_format
@pytest.mark.parametrize("word", [0, 1], ids=["incarnation", "generation"])
def test_a_stale_write_stores_nothing(name: str, kv_format: KvFormat, word: int) -> None:
    case = make_case(gqa(kv_format=kv_format), [1, 1, 1], [1, 1, 1])
    case.history.expected_N2[1, word] += 1
    before = case.read.storage_SU8.copy()
    make_backend(name, case.layout).write(1, case.streams, case.history)
    assert case.flags == [0, FLAG_KERNEL_WRITE, 0]
    changed = (case.read.storage_SU8 != before).any(axis=1)
    assert sorted(np.flatnonzero(changed)) == sorted(case.history.slot_N[[0, 2]].tolist())
    case.read.flags_B[:] = 0
    unchecked = case.without_checks()
    make_backend(name, case.layout).write(1, case.streams, unchecked.history)
    assert (case.read.storage_SU8[case.history.slot_N[1]] != before[case.history.slot_N[1]]).any()


@every_backend
@pytest.mark.parametrize("checked", [True, False])
def test_writes_of_flagged_rows_and_outside_the_pool_store_nothing(name: str, checked: bool) -> None:
    case = make_case(gqa(), [1] * 5, [1] * 5)
    case.read.flags_B[0] = FLAG_ENTRY
    last = int(case.history.slot_N[4])
    case.history.slot_N[1], case.history.slot_N[2] = -1, case.read.storage_SU8.shape[0]
    case.history.offset_N[3] = case.layout.page_tokens
    before, beyond = case.read.storage_SU8.copy(), case.beyond_U8.copy()
    history = case.history if checked else case.without_checks().history
    make_backend(name, case.layout).write(1, case.streams, history)
    assert case.flags == [FLAG_ENTRY, *[FLAG_KERNEL_WRITE] * 3, 0]
    changed = (case.read.storage_SU8 != before).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [last]
    assert (case.beyond_U8 == beyond).all()


@every_backend
@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_format
def test_kv_that_is_not_finite_is_never_stored(name: str, kv_format: KvFormat, bad: float, stream: int) -> None:
    case = make_case(gqa(kv_format=kv_format), [1, 1], [1, 1])
    case.streams[stream][1, 1, 3] = bad
    before = case.read.storage_SU8.copy()
    make_backend(name, case.layout).write(1, case.streams, case.history)
    assert case.flags == [0, FLAG_NONFINITE]
    changed = (case.read.storage_SU8 != before).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [case.history.slot_N[0]]


@every_backend
@every_format
def test_edge_values_are_stored_as_the_format_says(name: str, kv_format: KvFormat) -> None:
    top = float(np.finfo(np.float32).max)
    tiny = float(formats.TINY_ABSMAX)
    rows = [[0.0], [1e-45], [tiny, tiny / 2], [tiny / 2], [top, -top], [-top], [0.5, 1.5, 2.5, 127.0], [1e6, 1.0]]
    case = make_case(gqa(1, kv_format=kv_format), [1] * len(rows), [1] * len(rows))
    for token, row in enumerate(rows):
        for stream in case.streams:
            stream[token, 0] = torch.tensor(row + [0.0] * (8 - len(row)))
    make_backend(name, case.layout).write(1, case.streams, case.history)
    stored = case.read.storage_SU8.copy()
    poison(case.layout, case.read.storage_SU8)
    ReferenceBackend(case.layout).write(1, case.streams, case.history)
    assert (stored == case.read.storage_SU8).all()
    assert not any(case.flags)


@every_backend
def test_a_query_that_is_not_finite_shows_and_stays_in_its_token(name: str) -> None:
    case = mixed(gqa())
    healthy = run(name, case)
    bad = [0, 2, 6, 20]  # in decode, short and long rows
    case.query_NHD[bad, 1, 2] = torch.tensor([np.nan, np.inf, np.nan, np.nan])
    out = attend(name, case)
    assert out[bad, 1].isnan().all()
    keep = torch.ones(out.shape[:2], dtype=torch.bool)
    keep[bad, 1] = False
    assert torch.equal(out[keep], healthy[keep])


@every_backend
def test_scores_of_any_size_keep_their_softmax(name: str) -> None:
    case = make_case(gqa(kv_format=KvFormat.NONE), [1, 12], [20, 20])
    case.streams[0] *= 1e3
    case.query_NHD *= -1e3
    torch.testing.assert_close(run(name, case), dense_attention(case), rtol=1e-4, atol=1e-4)


@every_backend
@pytest.mark.parametrize("value_width", [8, 12])
def test_tokens_that_see_nothing_are_zeros(name: str, value_width: int) -> None:
    case = make_case(gqa(value_width=value_width), [1, 10, 0], [5, 10, 7])
    healthy = run(name, case)
    case.read.position_N[[0, 1, 2]] = -1
    query = torch.cat([case.query_NHD, case.query_NHD[:2]])  # two tokens that no row owns
    position = np.concatenate([case.read.position_N, [0, 0]])
    read = replace(case.read, position_N=position)
    out = make_backend(name, case.layout).attend(1, query, read, SCALE)
    assert (out[:3] == 0).all()
    assert (out[11:] == 0).all()
    torch.testing.assert_close(out[3:11], healthy[3:11], rtol=1e-5, atol=1e-5)


@every_backend
@pytest.mark.parametrize("new", [4, 12], ids=["short", "long"])
def test_positions_bound_what_a_token_sees(name: str, new: int) -> None:
    case = make_case(gqa(), [new], [20], seed=5)
    run(name, case)
    case.read.position_N[:] = np.random.default_rng(1).integers(0, 20, new)
    torch.testing.assert_close(attend(name, case), attend("reference", case), rtol=2e-5, atol=2e-5)


@every_backend
def test_a_step_reads_back_what_it_wrote(name: str) -> None:
    case = mixed(gqa())
    step = PagedStep(make_backend(name, case.layout), case.read, case.history)
    assert torch.equal(step(0, case.query_NHD, case.streams, SCALE), step(1, case.query_NHD, case.streams, SCALE))


@every_backend
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    case = mixed(gqa())
    whole = run(name, case)
    for row in (1, 3):
        at = case.tokens_of(row)
        read = replace(
            case.read,
            page_ids_BP=case.read.page_ids_BP[row : row + 1].copy(),
            expected_BP2=case.read.expected_BP2[row : row + 1].copy(),
            context_len_B=case.read.context_len_B[row : row + 1].copy(),
            query_start_B1=np.array([0, at.stop - at.start], np.int32),
            position_N=case.read.position_N[at].copy(),
            flags_B=np.zeros(1, np.int32),
        )
        alone = make_backend(name, case.layout).attend(1, case.query_NHD[at], read, SCALE)
        torch.testing.assert_close(alone, whole[at], rtol=1e-6, atol=1e-6)


@every_backend
def test_bad_arguments_are_refused_by_field(name: str) -> None:
    case = make_case(gqa(), [1], [9])
    backend = make_backend(name, case.layout)
    query, streams = case.query_NHD, case.streams
    calls = [
        ("layer", lambda: backend.attend(2, query, case.read, SCALE)),
        ("layer", lambda: backend.write(-1, streams, case.history)),
        ("query", lambda: backend.attend(0, query[:, :3], case.read, SCALE)),
        ("query", lambda: backend.attend(0, query[..., :4], case.read, SCALE)),
        ("query", lambda: backend.attend(0, query.double(), case.read, SCALE)),
        ("streams", lambda: backend.write(0, streams[:1], case.history)),
        ("streams", lambda: backend.write(0, [streams[0], streams[1][:5]], case.history)),
        ("streams", lambda: backend.write(0, [streams[0].half(), streams[1]], case.history)),
    ]
    if name != "reference":
        other = make_backend(name, gqa(page_tokens=16))
        calls.append(("layout", lambda: other.attend(0, query, case.read, SCALE)))
        calls.append(("layout", lambda: other.write(0, streams, case.history)))
        calls.append(("layout.kind", lambda: make_backend(name, mla())))
    for field, call in calls:
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field
    assert case.flags == [0]


@pytest.mark.skipif(INTERPRETED, reason="needs the other backends")
def test_backends_by_name() -> None:
    assert make_backend("auto", gqa()).name == "cpu"
    assert make_backend("auto", mla()).name == "reference"
    for name in ("reference", "cpu"):
        assert make_backend(name, gqa()).name == name
    for name, layout, field in [
        ("flash", gqa(), "attention_backend"),
        ("auto", gqa(kv_format=KvFormat.FP8), "layout.kv_format"),
        ("cpu", gqa(kv_format=KvFormat.NONE, element="bf16"), "layout.element"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            make_backend(name, layout)
        assert caught.value.field == field
