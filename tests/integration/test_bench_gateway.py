"""The gateway's benchmark runs, and its counts are right; its figures are not looked at."""

from __future__ import annotations

import json

from click.testing import CliRunner

from bench.gateway import command


def test_each_load_meets_both_fronts_and_every_token_arrives():
    arguments = ["--streams", "3", "--rate", "300", "--seconds", "0.2", "--model", "probe", "--json"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["front"], row["streams"], row["tokens"]) for row in rows] == [("gateway", 3, 60), ("pass", 3, 60)]
    # A step's token leaves before the next step's comes, unless the host is busy.
    assert all(1 <= row["tokens_per_message"] <= 20 for row in rows)
