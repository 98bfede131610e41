"""A step's arrays: whatever is altered in them, exactly the rows that it concerns are flagged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.ids import PageRef, Tag
from kvstore.step import PageRun, PlanRow, StepArrays, StepPlan

T = 4  # page tokens
FLAG = 16


def run(*page_ids: int) -> PageRun:
    return PageRun(tuple(PageRef(p, Tag(77, 3 + 2 * p)) for p in page_ids))


# Rows of one, three, two and one new tokens; the second wants no logits, the third crosses a page boundary.
PLAN = StepPlan(
    4,
    (
        PlanRow(101, (11,), 5, run(0, 1)),
        PlanRow(102, (12, 13, 14), 0, run(2), wants_logits=False),
        PlanRow(103, (15, 16), 7, run(3, 4, 5)),
        PlanRow(104, (17,), 2, run(6, 7)),  # one page in reserve
    ),
)
ROW_OF_TOKEN = [0, 1, 1, 1, 2, 2, 3]
WANTING = [0, 2, 3]

AXES = {
    "B": ("request_no_B", "seal_B", "context_len_B", "page_count_B", "page_ids_BP", "expected_BP2"),
    "N": ("token_ids_N", "position_N", "slot_N", "offset_N", "write_expected_N2", "row_N"),
    "R": ("logits_at_R", "logits_row_R"),
    "B1": ("query_start_B1",),
}
ARRAYS = [(axis, name) for axis, names in AXES.items() for name in names]


def build() -> StepArrays:
    return StepArrays.build(PLAN, T)


def flagged(arrays: StepArrays) -> set[int]:
    arrays.flags_B[:] = 0
    arrays.check_rows(FLAG)
    assert set(arrays.flags_B.tolist()) <= {0, FLAG}
    return set(np.flatnonzero(arrays.flags_B).tolist())


def rows_of(axis: str, index: int) -> set[int]:
    if axis == "B1":  # a boundary belongs to the row that ends and the row that starts there
        return {index - 1, index} & set(range(len(PLAN.rows)))
    return {{"B": index, "N": ROW_OF_TOKEN[index % 7], "R": WANTING[index % 3]}[axis]}


def elements() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    arrays = build()
    for axis, name in ARRAYS:
        for index in np.ndindex(getattr(arrays, name).shape):
            yield axis, name, index


def test_every_array_is_in_this_table() -> None:
    named = {name for _, name in ARRAYS}
    assert named == {f.name for f in fields(StepArrays)} - {"flags_B", "words", "halves", "own", "page_tokens", "pages"}


def test_what_was_built_is_not_flagged() -> None:
    arrays = build()
    assert flagged(arrays) == set()
    assert arrays.slot_N.tolist() == [1, 2, 2, 2, 4, 5, 6]
    assert arrays.offset_N.tolist() == [1, 0, 1, 2, 3, 0, 2]
    assert arrays.position_N.tolist() == [5, 0, 1, 2, 7, 8, 2]
    assert arrays.row_N.tolist() == ROW_OF_TOKEN
    assert arrays.logits_row_R.tolist() == WANTING
    assert arrays.logits_at_R.tolist() == [0, 5, 6]
    assert arrays.context_len_B.tolist() == [6, 3, 9, 3]
    assert arrays.query_start_B1.tolist() == [0, 1, 4, 6, 7]


@pytest.mark.parametrize("change", [1, -1, 1 << 20, -(1 << 20)])
@pytest.mark.parametrize(("axis", "name", "index"), list(elements()))
def test_one_altered_element_flags_its_row_and_no_other(
    axis: str, name: str, index: tuple[int, ...], change: int
) -> None:
    arrays = build()
    getattr(arrays, name)[index] += change
    wanted = rows_of(axis, index[0])
    if axis == "B1" and abs(change) > 7:  # a boundary beyond the batch makes more rows overlap, never fewer
        assert flagged(arrays) >= wanted
    else:
        assert flagged(arrays) == wanted


@pytest.mark.parametrize(("axis", "name"), ARRAYS)
def test_every_swap_within_an_array_flags_the_rows_that_it_changed(axis: str, name: str) -> None:
    length = len(getattr(build(), name))
    seen = 0
    for i, j in itertools.combinations(range(length), 2):
        arrays = build()
        array = getattr(arrays, name)
        before = array.copy()
        array[[i, j]] = array[[j, i]]
        changed = {k for k in range(length) if (array[k] != before[k]).any()}
        wanted = set().union(*(rows_of(axis, k) for k in changed))
        assert flagged(arrays) == wanted, (i, j)
        seen += bool(changed)
    assert seen


@pytest.mark.parametrize(("axis", "name"), ARRAYS)
def test_a_rotated_array_flags_every_row_that_it_changed(axis: str, name: str) -> None:
    arrays = build()
    array = getattr(arrays, name)
    before = array.copy()
    array[:] = np.roll(array, 1, axis=0)
    changed = {k for k in range(len(array)) if (array[k] != before[k]).any()}
    assert flagged(arrays) == set().union(*(rows_of(axis, k) for k in changed))


@pytest.mark.parametrize(("axis", "name"), ARRAYS)
def test_an_array_is_part_of_what_is_checked_and_no_other_takes_its_place(axis: str, name: str) -> None:
    """Checks read the two buffers, kernels the arrays: each must be a view of a buffer for good."""
    arrays = build()
    array = getattr(arrays, name)
    assert np.shares_memory(array, arrays.words) != np.shares_memory(array, arrays.halves)
    with pytest.raises(FrozenInstanceError):
        setattr(arrays, name, array.copy())


def test_the_arrays_cover_their_buffers_without_overlap() -> None:
    arrays = build()
    for name in (name for _, name in ARRAYS):
        getattr(arrays, name)[:] = 0
    arrays.flags_B[:] = 0
    assert not arrays.words.any()
    assert not arrays.halves.any()
    sizes = [getattr(arrays, name).nbytes for _, name in ARRAYS]
    assert sum(sizes) + arrays.flags_B.nbytes == arrays.words.nbytes + arrays.halves.nbytes


def swap_rows_everywhere(arrays: StepArrays, b: int, c: int) -> None:
    """Two rows of one length change places in all arrays: these still agree among themselves."""
    for name in (*AXES["B"],):
        array = getattr(arrays, name)
        array[[b, c]] = array[[c, b]]
    n, m = arrays.query_start_B1[b], arrays.query_start_B1[c]
    for name in AXES["N"]:
        if name != "row_N":
            array = getattr(arrays, name)
            array[[n, m]] = array[[m, n]]


def test_arrays_that_agree_in_another_order_than_the_plan_are_caught() -> None:
    arrays = build()
    swap_rows_everywhere(arrays, 0, 3)
    assert flagged(arrays) == {0, 3}


def test_arrays_of_another_plan_that_agree_among_themselves_are_caught() -> None:
    """Same requests, same shape, another token in one row: every seal fits its row, but not the plan's."""
    arrays = build()
    other = replace(PLAN, rows=(PLAN.rows[0], replace(PLAN.rows[1], token_ids=(12, 13, 99)), *PLAN.rows[2:]))
    foreign = StepArrays.build(other, T)
    arrays.words[:] = foreign.words
    arrays.halves[:] = foreign.halves
    assert flagged(arrays) == {1}


def test_a_position_that_comes_twice_with_all_that_belongs_to_it_is_caught() -> None:
    """The row's middle token would be written over its first one, in the right page with the right tag."""
    arrays = build()
    arrays.position_N[2] = arrays.position_N[1]
    arrays.offset_N[2] = arrays.offset_N[1]
    assert flagged(arrays) == {1}


def test_logits_that_moved_together_with_their_row_numbers_are_caught() -> None:
    arrays = build()
    arrays.logits_at_R[:] = arrays.logits_at_R[[1, 0, 2]]
    arrays.logits_row_R[:] = arrays.logits_row_R[[1, 0, 2]]
    assert flagged(arrays) == {0, 2}


def test_a_page_count_that_was_altered_is_no_way_out_of_the_tables() -> None:
    arrays = build()
    live = np.zeros((8, 2), dtype=np.int64)
    for p in range(8):
        live[p] = (77, 3 + 2 * p)
    arrays.page_count_B[1] = 1 << 30
    compared = arrays.check(live, 0, 2)
    assert compared == 2 + 3 + 3 + 2
    assert arrays.flags_B.tolist() == [0, 2, 0, 0], "padding is no live page"


@pytest.mark.parametrize("page_id", [-1, -8, 8, 1 << 30])
def test_live_comparison_refuses_pages_outside_the_pool(page_id: int) -> None:
    arrays = build()
    live = np.full((8, 2), 77, dtype=np.int64)
    live[:, 1] = 3 + 2 * np.arange(8)
    arrays.page_ids_BP[3, 1] = page_id
    arrays.expected_BP2[3, 1] = live[page_id % 8]
    arrays.check(live, 0, 2)
    assert arrays.flags_B.tolist() == [0, 0, 0, 2]


# --- plans that cannot be right -------------------------------------------------------------------------------------

BAD_ROWS = {
    "no_tokens": replace(PLAN.rows[0], token_ids=()),
    "too_few_pages": replace(PLAN.rows[0], first_position=8),
    "far_beyond": replace(PLAN.rows[0], first_position=1 << 28),
    "no_pages": replace(PLAN.rows[0], pages=PageRun(())),
    "before_the_start": replace(PLAN.rows[0], first_position=-1),
    "a_page_before": replace(PLAN.rows[0], first_position=-4),
}


@pytest.mark.parametrize("name", list(BAD_ROWS))
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_cannot_be_right_is_flagged_alone(name: str, place: int) -> None:
    rows = [PLAN.rows[1], PLAN.rows[2]]
    rows.insert(place, BAD_ROWS[name])
    arrays = StepArrays.build(StepPlan(1, tuple(rows)), T)
    arrays.check_rows(FLAG)
    assert np.flatnonzero(arrays.flags_B).tolist() == [place]
    written = arrays.slot_N[arrays.row_N == place]
    assert (written == -1).all(), "nothing may be written for it"


def test_a_request_number_that_two_rows_claim_flags_both() -> None:
    rows = (PLAN.rows[0], PLAN.rows[1], replace(PLAN.rows[2], request_no=101))
    arrays = StepArrays.build(StepPlan(1, rows), T)
    arrays.check_rows(FLAG)
    assert arrays.flags_B.tolist() == [FLAG, 0, FLAG]


def test_an_empty_plan_is_an_empty_step() -> None:
    arrays = StepArrays.build(StepPlan(1, ()), T)
    arrays.check_rows(FLAG)
    assert arrays.flags_B.size == arrays.row_N.size == arrays.logits_at_R.size == 0


# --- seals ----------------------------------------------------------------------------------------------------------

SMALL = st.integers(0, 3)


def seal_of(row: PlanRow) -> int:
    return int(StepArrays.build(StepPlan(1, (row,)), T).seal_B[0])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.tuples(SMALL, st.lists(SMALL, max_size=3), SMALL, st.lists(SMALL, max_size=3)),
    st.tuples(SMALL, st.lists(SMALL, max_size=3), SMALL, st.lists(SMALL, max_size=3)),
)
def test_seals_are_equal_exactly_when_rows_are(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    def seal(row: tuple) -> int:  # type: ignore[type-arg]
        return seal_of(PlanRow(row[0], tuple(row[1]), row[2], run(*row[3])))

    assert (seal(one) == seal(other)) is (one == other)


def test_a_seal_covers_both_halves_of_every_tag() -> None:
    row = PLAN.rows[0]
    seals = {seal_of(row)}
    for ref in (PageRef(1, Tag(78, 5)), PageRef(1, Tag(77, 7)), PageRef(2, Tag(77, 5))):
        seals.add(seal_of(replace(row, pages=PageRun((row.pages.refs[0], ref)))))
    seals.add(seal_of(replace(row, pages=PageRun(row.pages.refs[::-1]))))
    assert len(seals) == 5
    assert all(0 <= s < 1 << 63 for s in seals)


def test_a_run_is_extended_into_a_new_one() -> None:
    short = run(1)
    longer = short.extended(run(2).refs)
    assert (len(short.refs), len(longer.refs)) == (1, 2)
    assert longer.refs_P3.tolist() == run(1, 2).refs_P3.tolist() == [[1, 77, 5], [2, 77, 7]]
