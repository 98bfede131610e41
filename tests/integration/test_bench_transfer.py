"""The transfer benchmark runs, and tells where a verified pull's time goes; its figures are not looked at."""

from __future__ import annotations

import json

from click.testing import CliRunner

from bench.transfer import command


def test_each_cell_tells_its_parts():
    arguments = "--engine shm --page-bytes 4096 --pages 1 --pages 4 --budget-s 0.01 --json"
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["engine"], row["page_bytes"], row["pages"]) for row in rows] == [("shm", 4096, 1), ("shm", 4096, 4)]
    for row in rows:
        assert set(row["us_a_page"]) == {"bytes", "digest", "tags", "book"}
        assert all(value > 0 for value in row["us_a_page"].values()), "each part was on the way, and was measured"
        assert row["bare_us_a_page"] > 0
