"""A slice of the soak: requests through a real cluster leave nothing behind."""

from __future__ import annotations

import pytest

from cluster.chaos.soak import Soak, SoakSettings
from decode.engine import DecodeEngine
from kvstore.transfer.shm import ShmEngine

pytestmark = pytest.mark.timeout(240)


async def test_a_slice_of_the_soak_is_flat():
    report = await Soak(SoakSettings(requests=1500, restarts=2), lambda text, share: None).run()
    assert report.failures == ()
    assert report.restarts == 2
    watched = {j.name for j in report.series}
    tables = {"PeerTable._peers", "PrefixIndex._pages", "Ledger._loads", "LeaseTable._leases"}
    assert {
        "resident_bytes",
        "descriptors",
        "shared_regions",
        "registered_regions",
        "DecodeEngine._live",
    } | tables <= watched


async def test_a_table_that_keeps_one_entry_a_request_fails_the_soak(monkeypatch):
    finish = DecodeEngine._finish

    def leaking(self, outcome, live):
        finish(self, outcome, live)
        self.__dict__.setdefault("kept", []).append(outcome.request_no)

    monkeypatch.setattr(DecodeEngine, "_finish", leaking)
    report = await Soak(SoakSettings(requests=150, restarts=0), lambda text, share: None).run()
    assert "DecodeEngine.kept" in {j.name for j in report.series if not j.flat}
    assert report.ok == 150
    assert report.pages_back


async def test_a_region_that_is_kept_for_every_former_worker_fails_the_soak(monkeypatch):
    monkeypatch.setattr(ShmEngine, "disconnect", lambda self, peer: None)
    report = await Soak(SoakSettings(requests=150, restarts=3), lambda text, share: None).run()
    assert "registered_regions" in {j.name for j in report.series if not j.flat}
    assert report.ok == 150
