"""The gateway's benchmark runs, and its counts are right; its figures are not looked at."""

from __future__ import annotations

import json

from click.testing import CliRunner

from bench.gateway import command


def test_each_load_meets_both_fronts_and_every_token_arrives():
    arguments = ["--streams", "3", "--tokens-per-message", "4", "--tokens", "60", "--model", "probe", "--json"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["front"], row["streams"], row["tokens"]) for row in rows] == [("gateway", 3, 60), ("pass", 3, 60)]
    # The pass-through adds nothing: five messages with tokens and the end, for each of three answers.
    assert rows[1]["messages"] == 18
    assert rows[0]["messages"] >= 3
