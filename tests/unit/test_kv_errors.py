"""A typed error is the same error wherever it was copied to."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvstore.errors import GenlockError, NoCapacity


def kinds(base: type[GenlockError] = GenlockError) -> list[type[GenlockError]]:
    return [base, *(kind for below in base.__subclasses__() for kind in kinds(below))]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_a_copy_has_all_that_the_error_has(kind, copied):
    error = NoCapacity("a_reason", "words", field="a.field", retry_after_ms=7) if kind is NoCapacity else None
    error = error or kind("a_reason", "words", field="a.field")
    again = copied(error)
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert (again.args, again.status) == (error.args, error.status)
