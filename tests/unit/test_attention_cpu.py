"""What is the CPU backend's own: threads, teams, and kernels that are compiled before the first request."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvstore.layout import KvFormat
from kvstore.tables import FLAG_KERNEL_READ
from model.attention import cpu_kernels
from model.attention.cpu import CpuBackend
from model.attention.reference import ReferenceBackend
from model.attention.team import ThreadTeam
from tests.unit.attention_cases import SCALE, Case, gqa, make_case

BIG = gqa(kv_heads=4, key_width=32, value_width=32, page_tokens=32)


def big_case(seed: int) -> Case:
    """Large enough that both decode and prefill, and the write before them, are split among threads."""
    return make_case(BIG, [1, 1, 40, 1], [700, 600, 600, 400], seed=seed)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    case = big_case(0)
    one = CpuBackend(BIG, threads=1)
    one.write(0, case.streams, case.history)
    stored, expected = case.read.storage_SU8.copy(), one.attend(0, case.query_NHD, case.read, SCALE)
    many = CpuBackend(BIG, threads=threads)
    many.write(0, case.streams, case.history)
    assert (case.read.storage_SU8 == stored).all()
    assert torch.equal(many.attend(0, case.query_NHD, case.read, SCALE), expected)
    reference = ReferenceBackend(BIG).attend(0, case.query_NHD, case.read, SCALE)
    torch.testing.assert_close(expected, reference, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shared", [True, False], ids=["one backend", "a backend each"])
def test_workers_of_one_process_attend_at_once(shared: bool) -> None:
    cases = [big_case(seed) for seed in range(4)]
    backends = [CpuBackend(BIG, threads=2)] * 4 if shared else [CpuBackend(BIG, threads=2) for _ in cases]
    barrier = threading.Barrier(4)

    def work(index: int) -> list[torch.Tensor]:
        case, backend = cases[index], backends[index]
        barrier.wait(10)
        out = []
        for _ in range(5):
            backend.write(0, case.streams, case.history)
            out.append(backend.attend(0, case.query_NHD, case.read, SCALE))
        return out

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    for case, outs in zip(cases, results, strict=True):
        alone = CpuBackend(BIG, threads=1).attend(0, case.query_NHD, case.read, SCALE)
        assert all(torch.equal(out, alone) for out in outs)
        assert not any(case.flags)


@pytest.mark.parametrize("kv_format", [KvFormat.INT8, KvFormat.NONE])
def test_warm_up_leaves_nothing_to_compile(kv_format: KvFormat) -> None:
    layout = gqa(kv_format=kv_format)
    kernels = (cpu_kernels.attend_short, cpu_kernels.gather_row, cpu_kernels.write_tokens)
    backend = CpuBackend(layout, threads=1)
    backend.warm_up(layout)
    before = [len(kernel.signatures) for kernel in kernels]
    case = make_case(layout, [1, 12, 3], [30, 30, 30])
    backend.write(0, case.streams, case.history)
    for array in (case.read.storage_SU8, case.read.live_S2, case.read.page_ids_BP, case.read.expected_BP2):
        array.flags.writeable = False  # a reader may be given memory that it cannot write
    strided = torch.empty(16, 4, 16)[..., ::2].copy_(case.query_NHD)  # a slice of a fused projection
    backend.attend(1, strided, case.read, SCALE)
    assert [len(kernel.signatures) for kernel in kernels] == before
    assert not any(case.flags)


def test_a_tag_that_moves_in_the_middle_of_a_call_leaves_nothing_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kv head of the row is done when its page moves on; the other finds out."""
    case = make_case(gqa(kv_heads=2), [1, 1], [9, 9])
    backend = CpuBackend(case.layout)
    backend.write(0, case.streams, case.history)
    healthy = backend.attend(0, case.query_NHD, case.read, SCALE)
    kernel = cpu_kernels.attend_short

    def interrupted(start: int, stop: int, *rest: object) -> None:
        kernel(start, start + 1, *rest)
        case.read.live_S2[case.read.page_ids_BP[0, 2], 1] += 1
        kernel(start + 1, stop, *rest)

    monkeypatch.setattr(cpu_kernels, "attend_short", interrupted)
    out = backend.attend(0, case.query_NHD, case.read, SCALE)
    assert case.flags == [FLAG_KERNEL_READ, 0]
    assert (out[0] == 0).all()
    assert torch.equal(out[1], healthy[1])


def test_long_prefixes_are_attended_in_blocks() -> None:
    case = make_case(gqa(), [300], [333])
    backend = CpuBackend(case.layout)
    backend.write(0, case.streams, case.history)
    reference = ReferenceBackend(case.layout).attend(0, case.query_NHD, case.read, SCALE)
    torch.testing.assert_close(backend.attend(0, case.query_NHD, case.read, SCALE), reference, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 100])
def test_a_team_does_each_item_once(threads: int, items: int) -> None:
    team = ThreadTeam(threads)
    done = np.zeros(items, np.int64)

    def work(start: int, stop: int) -> None:
        done[start:stop] += 1

    for _ in range(20):
        team.run(work, items)
    assert (done == 20).all()
    team.close()
    team.run(work, items)
    assert (done == 21).all()


def test_a_team_reports_an_error_and_goes_on() -> None:
    team = ThreadTeam(2)
    done: list[int] = []

    def work(start: int, stop: int) -> None:
        done.extend(range(start, stop))
        if start == 0:
            raise ValueError("chunk 0")

    with pytest.raises(ValueError, match="chunk 0"):
        team.run(work, 50)
    assert sorted(done) == list(range(50))
    team.run(lambda start, stop: done.extend(range(start, stop)), 50)
    assert len(done) == 100
    team.close()


def test_a_busy_team_does_not_make_a_caller_wait() -> None:
    team = ThreadTeam(2)
    inside, release = threading.Event(), threading.Event()

    def slow(start: int, stop: int) -> None:
        inside.set()
        assert release.wait(10)

    holder = threading.Thread(target=team.run, args=(slow, 2))
    holder.start()
    assert inside.wait(10)
    chunks: list[tuple[int, int]] = []
    team.run(lambda start, stop: chunks.append((start, stop)), 30)
    assert chunks == [(0, 30)]
    release.set()
    holder.join(10)
    assert not holder.is_alive()
    team.close()


@pytest.mark.parametrize("end", ["close", "lose"])
def test_a_team_ends_its_helpers(end: str) -> None:
    earlier = set(threading.enumerate())
    team = ThreadTeam(3)
    team.run(lambda start, stop: None, 100)
    helpers = [thread for thread in threading.enumerate() if thread not in earlier]
    assert len(helpers) == 2
    if end == "close":
        team.close()
    else:
        del team
        gc.collect()
    for thread in helpers:
        thread.join(10)
        assert not thread.is_alive()


def test_a_team_lets_go_of_what_it_worked_on() -> None:
    """An idle helper that still held a pool's arrays would keep its memory from being unmapped."""
    team = ThreadTeam(3)
    array = np.zeros(100)
    alive = weakref.ref(array)

    def work(start: int, stop: int, array: np.ndarray = array) -> None:
        array[start:stop] += 1

    team.run(work, 100)
    assert (array == 1).all()
    del work, array
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
    team.close()
