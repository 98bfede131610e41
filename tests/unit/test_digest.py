"""The digest against its definition, and against every small way in which a page can be wrong."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.digest import PRIME, Digester, fold, reference_digest
from kvstore.errors import InvalidInput
from kvstore.header import PageHeader
from kvstore.ids import Tag
from kvstore.layout import HEADER_BYTES, AttentionKind, PageLayout

SECRET = bytes(range(32))
LAYOUT = PageLayout("m", AttentionKind.GQA, layers=1, kv_heads=1, key_width=4, value_width=6, page_tokens=4)


def pool(seed: int, slots: int, slot_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (slots, slot_bytes), dtype=np.uint8)


def by_the_book(secret: bytes, slot: bytes) -> int:
    """The docstring's formula, word by word in Python integers, keys included."""

    def stream(part: str, size: int) -> bytes:
        domain = f"genlock/digest/1/{part}/{len(slot)}".encode()
        return hashlib.shake_256(len(domain).to_bytes(2, "little") + domain + secret).digest(size)

    def words(raw: bytes) -> list[int]:
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]

    values = []
    for part, raw in (("body", slot[HEADER_BYTES:]), ("header", slot[:HEADER_BYTES])):
        message, key = words(raw), words(stream(part, len(raw) + 8))
        for t in (0, 1):
            total = 0
            for i in range(len(message) // 2):
                a = (message[2 * i] + key[2 * i + 2 * t]) % 2**32
                b = (message[2 * i + 1] + key[2 * i + 1 + 2 * t]) % 2**32
                total += a * b
            values.append(total % 2**64)
    values.append(len(slot))
    raw = stream("finish", 11 * 16)
    c = [int.from_bytes(raw[16 * j : 16 * j + 16], "little") % PRIME for j in range(11)]
    halves = [half for value in values for half in (value % 2**32, value >> 32)]
    return (c[0] + sum(k * w for k, w in zip(c[1:], halves, strict=True))) % PRIME


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.binary(min_size=16, max_size=40))
def test_every_way_to_compute_it_gives_one_value(seed: int, blocks: int, secret: bytes) -> None:
    slot_bytes = HEADER_BYTES + 64 * blocks
    src = pool(seed, 3, slot_bytes)
    dst = np.zeros((5, slot_bytes), np.uint8)
    digester = Digester(secret, slot_bytes)
    expected = by_the_book(secret, src[2].tobytes())
    sums = digester.copy_and_sum(src, np.array([2, 0]), dst, np.array([4, 1]))
    assert digester.finish(sums[0], dst[4, :HEADER_BYTES].tobytes()) == expected
    assert digester.digest(src[2]) == reference_digest(secret, src[2]) == expected
    assert (dst[4] == src[2]).all()
    assert (dst[1] == src[0]).all()
    assert not dst[[0, 2, 3]].any()
    many = digester.body_sums_many(dst, np.array([4, 1], np.int32))
    assert (many == sums).all()
    assert (digester.body_sums(src[0]) == sums[1]).all()


@pytest.mark.parametrize("fill", [0, 255])
def test_extreme_words_wrap_as_defined(fill: int) -> None:
    slot = np.full(HEADER_BYTES + 128, fill, np.uint8)
    assert Digester(SECRET, slot.size).digest(slot) == by_the_book(SECRET, slot.tobytes())


def test_every_single_bit_of_the_page_counts() -> None:
    slot = pool(7, 1, LAYOUT.slot_bytes)[0]
    slot[:HEADER_BYTES] = np.frombuffer(PageHeader(Tag(5, 7), 9, 32, 4, bytes(32)).pack(), np.uint8)
    assert LAYOUT.slot_bytes > HEADER_BYTES + LAYOUT.layer_bytes, "the page must have padding for this test"
    digester = Digester(SECRET, LAYOUT.slot_bytes)
    seen = {digester.digest(slot)}
    for bit in range(8 * slot.size):
        slot[bit // 8] ^= 1 << bit % 8
        seen.add(digester.digest(slot))
        slot[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * slot.size + 1


def test_moved_words_and_rows_change_it() -> None:
    slot = pool(8, 1, LAYOUT.slot_bytes)[0]
    digester = Digester(SECRET, LAYOUT.slot_bytes)
    whole = digester.digest(slot)
    words = slot.view(np.uint32)
    for i in range(words.size - 1):
        for j in (i + 1, i + 2):
            if j < words.size:
                words[[i, j]] = words[[j, i]]
                assert digester.digest(slot) != whole, (i, j)
                words[[i, j]] = words[[j, i]]
    assert digester.digest(slot) == whole


def test_the_secret_and_the_length_are_covered() -> None:
    slot = np.zeros(256, np.uint8)
    longer = np.zeros(320, np.uint8)
    digests = {Digester(secret, s.size).digest(s) for secret in (SECRET, SECRET[::-1]) for s in (slot, longer)}
    assert len(digests) == 4
    key = tuple(range(3, 14))
    assert fold((1, 2, 3, 4, 256), key) != fold((1, 2, 3, 4, 320), key)


def test_header_and_body_do_not_trade_places() -> None:
    slot = pool(9, 1, 256)[0]
    digester = Digester(SECRET, 256)
    swapped = np.concatenate([slot[128:], slot[:128]])
    assert digester.digest(slot) != digester.digest(swapped)


def test_digests_are_61_bit_and_fit_the_wire() -> None:
    digester = Digester(SECRET, 192)
    values = [digester.digest(slot) for slot in pool(10, 64, 192)]
    assert all(0 <= value < PRIME for value in values)
    assert len(set(values)) == 64
    assert max(values).bit_length() == 61


def test_read_only_memory_is_a_fine_source() -> None:
    src = pool(11, 2, 192)
    dst = np.zeros_like(src)
    src.flags.writeable = False
    digester = Digester(SECRET, 192)
    digester.copy_and_sum(src, np.arange(2), dst, np.arange(2))
    assert (src == dst).all()
    assert digester.digest(src[1]) == digester.digest(dst[1])
    assert not src.flags.writeable


def test_threads_copy_at_once() -> None:
    src = pool(12, 64, 4096 + 128)
    dst = np.zeros_like(src)
    digester = Digester(SECRET, src.shape[1])
    ids = np.arange(64)

    def copy(part: int) -> np.ndarray:
        return digester.copy_and_sum(src, ids[part::4], dst, ids[part::4])

    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(copy, range(4)))
    whole = digester.body_sums_many(src, ids)
    for part, sums in enumerate(parts):
        assert (sums == whole[part::4]).all()
    assert (src == dst).all()


def test_bad_input_is_refused_by_field_and_nothing_is_copied() -> None:
    src, dst = pool(13, 2, 192), np.zeros((2, 192), np.uint8)
    digester = Digester(SECRET, 192)
    odd = np.zeros(2 * 192 + 1, np.uint8)[1:].reshape(2, 192)
    frozen = dst.copy()
    frozen.flags.writeable = False
    one = np.array([1])
    cases = [
        ("digest.secret", lambda: Digester(b"short", 192)),
        ("digest.slot_bytes", lambda: Digester(SECRET, 128)),
        ("digest.slot_bytes", lambda: Digester(SECRET, 200)),
        ("src", lambda: digester.copy_and_sum(src[:, :128], one, dst, one)),
        ("src", lambda: digester.copy_and_sum(odd, one, dst, one)),
        ("dst", lambda: digester.copy_and_sum(src, one, frozen, one)),
        ("src_ids", lambda: digester.copy_and_sum(src, np.array([2]), dst, one)),
        ("dst_ids", lambda: digester.copy_and_sum(src, one, dst, np.array([-1]))),
        ("dst_ids", lambda: digester.copy_and_sum(src, one, dst, np.array([0, 1]))),
        ("header", lambda: digester.finish((0, 0), b"short")),
    ]
    for field, call in cases:
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field
    assert not dst.any()
