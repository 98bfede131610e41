"""The process that looks at schemas first: what it says, and that it, not the gateway, ends over a bad one."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from cluster.gateway.schemas import SchemaCheck
from kvstore.errors import InvalidInput, NoCapacity, Unavailable

ENDLESS = json.dumps({"type": "integer", "multipleOf": 1000003})
COUNTING = 'import sys\nfor n, _ in enumerate(sys.stdin):\n print(\'["bad_json_schema", "%d"]\' % n, flush=True)'
SILENT = "import time\ntime.sleep(60)"


@pytest.fixture
async def made():
    checks = []

    def make(*command: str, **fields: object) -> SchemaCheck:
        checks.append(SchemaCheck(**({"command": command} if command else {}), **fields))
        return checks[-1]

    yield make
    for check in checks:
        await check.close()


async def refusal(check: SchemaCheck, schema: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        await check.check(schema)
    assert caught.value.field == "sampling_params.json_schema"
    return caught.value


async def test_a_schema_without_end_ends_the_process_and_the_next_one_is_answered(made):
    check = made()
    await check.check('{"type": "object"}')
    first = check._process
    assert (await refusal(check, ENDLESS)).reason == "json_schema_too_complex"
    assert first.returncode is not None
    await check.check('{"type": "string"}')
    assert (await refusal(check, '{"type": "nope"}')).reason == "bad_json_schema"
    second = check._process
    # Known by now: no process is asked, and none ends.
    assert (await refusal(check, ENDLESS)).reason == "json_schema_too_complex"
    assert check._process is second
    assert second.returncode is None


async def test_answers_are_remembered_but_not_for_ever(made):
    check = made(sys.executable, "-c", COUNTING, kept=2)
    assert [(await refusal(check, name)).message for name in "aabbaca"] == list("0011020")
    assert (await refusal(check, "b")).message == "3"


async def test_a_caller_that_leaves_takes_no_answer_of_another(made):
    check = made(sys.executable, "-c", "import time\ntime.sleep(0.5)\n" + COUNTING)
    leaving = asyncio.create_task(check.check("a"))
    await asyncio.sleep(0.2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await refusal(check, "b")).message == "0"


async def test_a_host_that_does_not_answer_and_one_that_has_no_process(made):
    with pytest.raises(NoCapacity) as busy:
        await made(sys.executable, "-c", SILENT, wait_s=0.2).check("{}")
    assert busy.value.reason == "schema_check_busy"
    with pytest.raises(Unavailable) as none:
        await made("/nonexistent/python").check("{}")
    assert none.value.reason == "schema_check_failed"


async def test_a_folder_where_the_gateway_stands_is_not_taken_for_its_modules(made, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    for name in ("__init__", "schema_check"):
        (tmp_path / "model" / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    await made().check('{"type": "object"}')
