"""Many digests at once equal one after another, also at the edges of the modular arithmetic."""

import numpy as np
import pytest

from kvstore.digest import Digester, reference_digest
from kvstore.errors import InvalidInput

SECRET = b"sixteen bytes or more"


@pytest.mark.parametrize("slot_bytes", [192, 64 * 33, 16_384 + 128, 3 * 16_384 + 192])
def test_copy_sum_and_finish_agree_with_the_definition(slot_bytes: int) -> None:
    rng = np.random.default_rng(slot_bytes)
    source = rng.integers(0, 256, (12, slot_bytes), dtype=np.uint8)
    source[3], source[4] = 255, 0
    target, ids, targets = np.zeros_like(source), rng.permutation(12), rng.permutation(12)
    digester = Digester(SECRET, slot_bytes)
    sums = digester.copy_and_sum(source, ids, target, targets)
    np.testing.assert_array_equal(target[targets], source[ids])
    digests = digester.finish_many(sums, target, targets)
    assert digests.tolist() == [reference_digest(SECRET, source[i]) for i in ids]


def test_finish_many_equals_finish_for_extreme_sums() -> None:
    rng = np.random.default_rng(1)
    sums = rng.integers(0, 1 << 64, (200, 2), dtype=np.uint64)
    sums[0], sums[1], sums[2] = 0, (1 << 64) - 1, (1 << 63, (1 << 32) - 1)
    storage = rng.integers(0, 256, (200, 192), dtype=np.uint8)
    storage[1] = 255
    digester = Digester(SECRET, 192)
    expected = [digester.finish((int(a), int(b)), storage[i, :128].tobytes()) for i, (a, b) in enumerate(sums)]
    assert digester.finish_many(sums, storage, np.arange(200)).tolist() == expected


def test_finish_many_names_bad_input() -> None:
    digester, storage = Digester(SECRET, 192), np.zeros((2, 192), np.uint8)
    for sums, ids, field in ((np.zeros((1, 2)), [0, 1], "body_sums"), (np.zeros((1, 2)), [2], "page_ids")):
        with pytest.raises(InvalidInput) as caught:
            digester.finish_many(sums.astype(np.uint64), storage, np.array(ids))
        assert caught.value.field == field
