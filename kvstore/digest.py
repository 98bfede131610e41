"""The digest: a 61-bit keyed hash over everything that a page holds, computed alike on CPU and GPU.

A slot is a header of 128 bytes and a body of `slot_bytes - 128` bytes (a multiple of 64), both read as little-endian
32-bit words m_0, m_1, ... With key words k_0, k_1, ... of its own, each part is summed twice (t = 0, 1):

    sum_t = Σ_i ((m_2i + k_(2i+2t)) mod 2^32) · ((m_(2i+1) + k_(2i+1+2t)) mod 2^32)   mod 2^64

This is NH of Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: Fast and Secure Message Authentication" (CRYPTO
1999), adjacent words paired, with its Toeplitz extension: the second pass shifts the key by one pair. Two different
parts of one length share one sum with probability at most 2^-32, and both sums with at most 2^-64. A plain sum of
products has no order, so a GPU or several threads may reduce it as they like.

The finish folds ten words w_1..w_10 (body sums 0 and 1, header sums 0 and 1, byte length; each as low, then high
32-bit half) with the multilinear hash modulo the Mersenne prime p = 2^61 - 1:

    digest = c_0 + Σ_j c_j · w_j   mod p        c_j uniform in [0, p)

For two different word vectors this is strongly universal (p > 2^32): they collide with probability 1/p. Two different
pages therefore collide with at most 2^-64 (body) + 2^-64 (header) + 1/(2^61 - 1) < 2^-60, whoever chose the pages, as
long as they were chosen without knowing the key. All keys come from the cluster's secret through SHAKE-256, one
domain for each part and slot size. The digest detects foreign, torn and corrupted pages. It is no MAC against someone
who sees many digests of pages of their own choice: such a peer holds the cluster's secret anyway.

Legend: S slots of a pool, n pages of a call, U8 bytes of a slot. Words live in memory as uint64 pairs (low half is
m_2i), so the shifted key of the second pass is the next element of the same array.
"""

from __future__ import annotations

import hashlib

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES, SLOT_ALIGN_BYTES

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

PRIME = (1 << 61) - 1
HEADER_PAIRS = HEADER_BYTES // 8
MIN_SECRET_BYTES = 16
_FINISH_WORDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_LOW29 = np.uint64((1 << 29) - 1)
_PRIME = np.uint64(PRIME)
_LOW_INT = 0xFFFFFFFF


@numba.njit(cache=True, nogil=True)
def _sum_pairs(pairs, key, out_2):  # type: ignore[no-untyped-def]  # compiled
    """Both NH sums of a 1-D run of word pairs."""
    first = np.uint64(0)
    second = np.uint64(0)
    for i in range(pairs.shape[0]):
        word = pairs[i]
        high = word >> _HALF
        first += ((word + key[i]) & _LOW) * ((high + (key[i] >> _HALF)) & _LOW)
        second += ((word + key[i + 1]) & _LOW) * ((high + (key[i + 1] >> _HALF)) & _LOW)
    out_2[0] = first
    out_2[1] = second


@intrinsic
def _move_words(typing_context, target, source, count):  # type: ignore[no-untyped-def]
    """memcpy of `count` words between two 1-D arrays: on large runs it avoids reading the target's lines first."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        arrays = [context.make_array(kind)(context, builder, arg) for kind, arg in zip(signature.args, args[:2])]  # noqa: B905
        cgutils.raw_memcpy(builder, arrays[0].data, arrays[1].data, args[2], 8)
        return context.get_dummy_value()

    return types.void(target, source, count), generate


@numba.njit(cache=True, nogil=True)
def _sum_pages(storage_SW, ids_n, key, out_n2):  # type: ignore[no-untyped-def]
    for n in range(ids_n.shape[0]):
        _sum_pairs(storage_SW[ids_n[n], HEADER_PAIRS:], key, out_n2[n])


@numba.njit(cache=True, nogil=True)
def _copy_pages(src_SW, src_ids_n, dst_SW, dst_ids_n, key, out_n2):  # type: ignore[no-untyped-def]
    """Copies page after page and sums what was stored, so a writer that tears the source cannot come between.

    A page that was just copied is in cache: a copy and then a sum, each at its full speed, beat one loop doing both.
    """
    for n in range(src_ids_n.shape[0]):
        dst = dst_SW[dst_ids_n[n]]
        _move_words(dst, src_SW[src_ids_n[n]], dst.shape[0])
        _sum_pairs(dst[HEADER_PAIRS:], key, out_n2[n])


@numba.njit(cache=True, nogil=True)
def _out_of_range(ids_n, slots):  # type: ignore[no-untyped-def]
    for i in range(ids_n.shape[0]):  # noqa: SIM110  # a compiled loop; generators are not
        if ids_n[i] < 0 or ids_n[i] >= slots:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _times(value, key):  # type: ignore[no-untyped-def]
    """A 32-bit value times a residue below p: congruent modulo p, and below 2^63. Uses that 2^61 is 1 modulo p."""
    high = value * (key >> _HALF)  # below 2^61, and counts 2^32
    low = value * (key & _LOW)
    return (high >> np.uint64(29)) + ((high & _LOW29) << _HALF) + (low >> np.uint64(61)) + (low & _PRIME)


@numba.njit(cache=True, nogil=True)
def _finish_pages(storage_SW, ids_n, body_n2, header_key, finish_key, slot_bytes, out_n):  # type: ignore[no-untyped-def]
    words_5 = np.empty(5, np.uint64)
    words_5[4] = slot_bytes
    for n in range(ids_n.shape[0]):
        words_5[0] = body_n2[n, 0]
        words_5[1] = body_n2[n, 1]
        _sum_pairs(storage_SW[ids_n[n], :HEADER_PAIRS], header_key, words_5[2:4])
        total = finish_key[0]
        for j in range(5):
            total = (total + _times(words_5[j] & _LOW, finish_key[2 * j + 1])) % _PRIME
            total = (total + _times(words_5[j] >> _HALF, finish_key[2 * j + 2])) % _PRIME
        out_n[n] = total


class Digester:
    """Digests pages of one slot size under one secret. Immutable after construction; safe from any thread.

    `secret`: at least 16 bytes. `slot_bytes`: header and body, a multiple of 64, above 128.
    Raises InvalidInput naming `digest.secret` or `digest.slot_bytes`.
    """

    def __init__(self, secret: bytes, slot_bytes: int) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise InvalidInput(
                "bad_secret", f"digest.secret must have at least {MIN_SECRET_BYTES} bytes", field="digest.secret"
            )
        if slot_bytes <= HEADER_BYTES or slot_bytes % SLOT_ALIGN_BYTES:
            raise InvalidInput(
                "bad_slot_bytes",
                f"digest.slot_bytes must be a multiple of {SLOT_ALIGN_BYTES} above {HEADER_BYTES}",
                field="digest.slot_bytes",
            )
        self.slot_bytes = slot_bytes
        body_pairs = (slot_bytes - HEADER_BYTES) // 8
        self.body_key = _pairs_from(secret, "body", slot_bytes, body_pairs + 1)
        self.header_key = _pairs_from(secret, "header", slot_bytes, HEADER_PAIRS + 1)
        self._finish_key = _residues_from(secret, slot_bytes, _FINISH_WORDS + 1)
        self._finish_key_words = np.array(self._finish_key, np.uint64)

    def warm_up(self) -> None:
        """Compiles, or loads from the cache, every kernel, so that no request waits for it."""
        slots_2U8 = np.zeros((2, self.slot_bytes), np.uint8)
        sums_12 = self.copy_and_sum(slots_2U8, np.zeros(1, np.int64), slots_2U8, np.ones(1, np.int64))
        self.finish_many(sums_12, slots_2U8, np.ones(1, np.int64))
        self.digest(slots_2U8[0])

    def body_sums(self, slot_U8: U8) -> U64:
        """Body sums uint64 [2] of one slot, uint8 [slot_bytes]."""
        sums_2: U64 = self.body_sums_many(slot_U8[None], np.zeros(1, np.int64))[0]
        return sums_2

    def body_sums_many(self, storage_SU8: U8, page_ids_n: npt.NDArray[np.integer]) -> U64:
        """Body sums uint64 [n, 2] of the pages `page_ids_n` of a pool uint8 [S, slot_bytes].

        Raises InvalidInput naming `storage` (shape, alignment) or `page_ids` (range).
        """
        storage_SW = self._words(storage_SU8, "storage")
        ids_n = _checked_ids(page_ids_n, storage_SW.shape[0], "page_ids")
        out_n2 = np.empty((ids_n.shape[0], 2), np.uint64)
        _sum_pages(storage_SW, ids_n, self.body_key, out_n2)
        return out_n2

    def copy_and_sum(
        self,
        src_SU8: U8,
        src_ids_n: npt.NDArray[np.integer],
        dst_SU8: U8,
        dst_ids_n: npt.NDArray[np.integer],
    ) -> U64:
        """Copies whole slots and returns the body sums uint64 [n, 2] of exactly the words that were stored.

        Runs without the GIL, page after page: to use several cores, give each thread its own ids. Read the header
        for `finish` from the destination, not from the source, which may have changed since.
        Raises InvalidInput naming `src`, `dst`, `src_ids` or `dst_ids`; nothing has been copied then.
        """
        src_SW = self._words(src_SU8, "src")
        dst_SW = self._words(dst_SU8, "dst", writable=True)
        src_ids = _checked_ids(src_ids_n, src_SW.shape[0], "src_ids")
        dst_ids = _checked_ids(dst_ids_n, dst_SW.shape[0], "dst_ids")
        if src_ids.shape != dst_ids.shape:
            raise InvalidInput("bad_ids", "src_ids and dst_ids differ in length", field="dst_ids")
        out_n2 = np.empty((src_ids.shape[0], 2), np.uint64)
        _copy_pages(src_SW, src_ids, dst_SW, dst_ids, self.body_key, out_n2)
        return out_n2

    def finish(self, body_sums_2: npt.NDArray[np.uint64] | tuple[int, int], header_128: bytes) -> int:
        """The digest in [0, 2^61 - 1), from body sums uint64 [2] and the header's 128 bytes."""
        if len(header_128) != HEADER_BYTES:
            raise InvalidInput("bad_header", f"a header has {HEADER_BYTES} bytes", field="header")
        header_2 = np.empty(2, np.uint64)
        _sum_pairs(np.frombuffer(header_128, np.uint64), self.header_key, header_2)
        values = (int(body_sums_2[0]), int(body_sums_2[1]), int(header_2[0]), int(header_2[1]), self.slot_bytes)
        return fold(values, self._finish_key)

    def finish_many(
        self, body_sums_n2: npt.NDArray[np.uint64], storage_SU8: U8, page_ids_n: npt.NDArray[np.integer]
    ) -> U64:
        """Digests uint64 [n] of pages of a pool uint8 [S, slot_bytes], whose bodies have these sums uint64 [n, 2].

        Equal to `finish` page by page. Raises InvalidInput naming `storage`, `page_ids` or `body_sums`.
        """
        storage_SW = self._words(storage_SU8, "storage")
        ids_n = _checked_ids(page_ids_n, storage_SW.shape[0], "page_ids")
        sums_n2 = np.ascontiguousarray(body_sums_n2, np.uint64)
        if sums_n2.shape != (ids_n.shape[0], 2):
            raise InvalidInput("bad_sums", "body_sums must be [n, 2], n the number of pages", field="body_sums")
        out_n = np.empty(ids_n.shape[0], np.uint64)
        _finish_pages(
            storage_SW, ids_n, sums_n2, self.header_key, self._finish_key_words, np.uint64(self.slot_bytes), out_n
        )
        return out_n

    def digest(self, slot_U8: U8) -> int:
        """The digest of one whole slot, uint8 [slot_bytes]."""
        return self.finish(self.body_sums(slot_U8), slot_U8[:HEADER_BYTES].tobytes())

    def _words(self, storage_SU8: U8, field: str, *, writable: bool = False) -> U64:
        """The pool as word pairs uint64 [S, slot_bytes / 8]; read-only unless asked, so each kernel has one type."""
        if (
            storage_SU8.ndim != 2
            or storage_SU8.dtype != np.uint8
            or storage_SU8.shape[1] != self.slot_bytes
            or not storage_SU8.flags.c_contiguous
            or storage_SU8.ctypes.data % 8
        ):
            raise InvalidInput(
                "bad_storage",
                f"{field} must be C-contiguous, 8-byte aligned uint8 [S, {self.slot_bytes}]",
                field=field,
            )
        if writable and not storage_SU8.flags.writeable:
            raise InvalidInput("bad_storage", f"{field} is read-only", field=field)
        words_SW = storage_SU8.view(np.uint64)
        if not writable:
            words_SW.flags.writeable = False
        return words_SW


def fold(values: tuple[int, ...], key: tuple[int, ...]) -> int:
    """Multilinear hash of 64-bit `values`, taken as low and high 32-bit halves, modulo 2^61 - 1."""
    total = key[0]
    for j, value in enumerate(values):
        total += key[2 * j + 1] * (value & _LOW_INT) + key[2 * j + 2] * (value >> 32)
    return total % PRIME


def reference_digest(secret: bytes, slot_U8: U8) -> int:
    """The same value from the definition alone, in plain numpy; the oracle for every faster version."""
    digester = Digester(secret, slot_U8.shape[0])
    sums: list[int] = []
    for part_U8, pairs in ((slot_U8[HEADER_BYTES:], digester.body_key), (slot_U8[:HEADER_BYTES], digester.header_key)):
        words = np.ascontiguousarray(part_U8).view("<u4")
        key = pairs.view("<u4")
        for shift in (0, 2):
            keyed = words + key[shift : shift + words.shape[0]]  # uint32 arithmetic wraps
            sums.append(int((keyed[0::2].astype(np.uint64) * keyed[1::2].astype(np.uint64)).sum(dtype=np.uint64)))
    return fold((*sums, slot_U8.shape[0]), digester._finish_key)


def _checked_ids(ids_n: npt.NDArray[np.integer], slots: int, field: str) -> Ids:
    out = np.ascontiguousarray(ids_n, np.int64)
    if out.ndim != 1 or _out_of_range(out, slots):
        raise InvalidInput("bad_ids", f"{field} must be 1-D page ids in [0, {slots})", field=field)
    return out


def _stream(secret: bytes, part: str, slot_bytes: int, size: int) -> bytes:
    domain = f"genlock/digest/1/{part}/{slot_bytes}".encode()
    return hashlib.shake_256(len(domain).to_bytes(2, "little") + domain + secret).digest(size)


def _pairs_from(secret: bytes, part: str, slot_bytes: int, pairs: int) -> U64:
    # A read-only key has the same kernel type everywhere, and nobody can change it.
    return np.frombuffer(_stream(secret, part, slot_bytes, pairs * 8), "<u8")


def _residues_from(secret: bytes, slot_bytes: int, count: int) -> tuple[int, ...]:
    """Uniform residues modulo 2^61 - 1, from 128 bits each: the bias is below 2^-66."""
    raw = _stream(secret, "finish", slot_bytes, count * 16)
    return tuple(int.from_bytes(raw[16 * j : 16 * j + 16], "little") % PRIME for j in range(count))
