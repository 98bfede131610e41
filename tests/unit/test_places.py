"""Places of a tenant beside its running requests."""

from __future__ import annotations

import pytest

from cluster.gateway.places import Places
from kvstore.errors import NoCapacity


def test_each_tenant_has_so_many_places_and_gets_them_back():
    places = Places("aborts of this caller are under way", 1234)
    with places.held("a", 2), places.held("a", 2), places.held("b", 1):
        with pytest.raises(NoCapacity) as caught, places.held("a", 2):
            raise AssertionError("a third place of two")
        assert (caught.value.reason, caught.value.retry_after_ms) == ("tenant_full", 1234)
        assert "2 aborts" in caught.value.message
    with pytest.raises(ZeroDivisionError), places.held("a", 1):
        _ = 1 / 0
    with places.held("a", 1):
        pass
