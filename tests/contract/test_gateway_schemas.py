"""The process that looks at schemas first: what it says, what its end means, whose turn it is, and who learns of it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import pytest

from cluster.gateway.schemas import KnownSchemas, SchemaCheck
from kvstore.errors import GenlockError, InvalidInput, NoCapacity, Unavailable

ENDLESS = json.dumps({"type": "integer", "multipleOf": 1000003})
# Its answer says how many it was asked before.
COUNTING = 'import sys\nfor n, _ in enumerate(sys.stdin):\n print(\'["bad_json_schema", "%d"]\' % n, flush=True)'
SILENT = "import time\ntime.sleep(60)"
# Ends by a signal over each schema, after the first bytes of an answer; counts its lives in a file.
ENDING = """
import os, sys
with open({lives!r}, "a+") as kept:
    print("a life", file=kept, flush=True)
    kept.seek(0)
    lives = len(kept.readlines())
for _line in sys.stdin:
    if lives > {ends}:
        print("null", flush=True)
        continue
    print("nu", end="", flush=True)
    os.kill(os.getpid(), {signal})
"""
# The real one with little memory.
SMALL = "from model import schema_check as s\ns.MEMORY_BYTES = 250 << 20\ns.CPU_S = 60.0\ns.main()"


@pytest.fixture
async def made():
    checks = []

    def make(*command: str, **fields: object) -> SchemaCheck:
        fields = {"wait_s": 120.0, **fields}
        checks.append(SchemaCheck(**({"command": command} if command else {}), **fields))
        return checks[-1]

    yield make
    for check in checks:
        await check.close()


def counting(made, **fields: object) -> SchemaCheck:
    return made(sys.executable, "-c", COUNTING, **fields)


async def refusal(check: SchemaCheck, schema: str, tenant: str = "acme") -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        await check.check(tenant, schema)
    assert caught.value.field == "sampling_params.json_schema"
    return caught.value


def process_of(check: SchemaCheck):
    return check._process._process


async def test_a_schema_without_end_ends_the_process_and_the_next_one_is_answered(made):
    check = made()
    await check.check("acme", '{"type": "object"}')
    first = process_of(check)
    assert (await refusal(check, ENDLESS)).reason == "json_schema_too_complex"
    assert first.returncode is not None
    await check.check("acme", '{"type": "string"}')
    assert (await refusal(check, '{"type": "nope"}')).reason == "bad_json_schema"
    second = process_of(check)
    # Known by now: no process is asked, and none ends.
    assert (await refusal(check, ENDLESS)).reason == "json_schema_too_complex"
    assert process_of(check) is second
    assert second.returncode is None


async def test_a_schema_that_takes_too_much_memory_is_too_complex(made):
    check = made(sys.executable, "-c", SMALL)
    await check.check("acme", '{"type": "object"}')
    first = process_of(check)
    error = await refusal(check, json.dumps({"type": "integer", "multipleOf": 10000003}))
    assert error.reason == "json_schema_too_complex"
    assert first.returncode == -signal.SIGABRT


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_process_that_others_end_says_nothing_of_the_schema(made, tmp_path, ended_by):
    """Ended once it is asked again; ended twice the caller may come again, and then it is asked anew."""
    script = {"lives": str(tmp_path / "lives"), "signal": int(ended_by)}
    once = made(sys.executable, "-c", ENDING.format(ends=1, **script))
    await once.check("acme", '{"type": "object"}')
    (tmp_path / "lives").unlink()
    twice = made(sys.executable, "-c", ENDING.format(ends=2, **script))
    with pytest.raises(Unavailable) as caught:
        await twice.check("acme", '{"type": "object"}')
    assert caught.value.reason == "schema_check_failed"
    await twice.check("acme", '{"type": "object"}')


async def test_a_process_that_was_ended_between_two_schemas_is_begun_again(made):
    check = made()
    await check.check("acme", '{"type": "object"}')
    process_of(check).kill()
    await check.check("acme", '{"type": "string"}')


async def test_answers_are_remembered_but_not_for_ever(made):
    check = counting(made, kept=2)
    assert [(await refusal(check, name)).message for name in "aabbaca"] == list("0011020")
    assert (await refusal(check, "b")).message == "3"


async def test_a_tenant_learns_nothing_of_what_another_one_has_asked(made):
    """Each tenant's schema is looked at anew, and nobody's puts another's out."""
    check = counting(made, kept=2)
    asked = [("a", "x"), ("b", "x"), ("b", "y"), ("b", "z"), ("a", "x"), ("b", "x")]
    assert [(await refusal(check, schema, tenant)).message for tenant, schema in asked] == list("012304")


def test_what_is_remembered_has_a_limit():
    known = KnownSchemas(kept=2, kept_tenants=3)
    for tenant in "abcde":
        for schema in (b"1", b"2", b"3"):
            known.add((tenant, schema), None)
    assert {tenant for tenant in "abcde" if (tenant, b"3") in known} == set("cde")
    assert [name for name in (b"1", b"2", b"3") if ("e", name) in known] == [b"2", b"3"]


async def test_tenants_take_turns(made):
    """One that brings many is asked one in turn with the others; the numbers say in which order."""
    check = counting(made)
    names = [("a", "1"), ("a", "2"), ("a", "3"), ("a", "4"), ("b", "1"), ("b", "2"), ("c", "1")]
    asks = [asyncio.create_task(refusal(check, tenant + name, tenant)) for tenant, name in names]
    order = [int((await ask).message) for ask in asks]
    assert [names[order.index(place)] for place in range(len(names))] == [
        ("a", "1"), ("b", "1"), ("c", "1"), ("a", "2"), ("b", "2"), ("a", "3"), ("a", "4"),
    ]  # fmt: skip


async def test_one_that_comes_while_another_is_looked_at_is_next(made):
    """A tenant whose one schema is under way and who has many more takes no second turn before a tenant that came."""
    check = counting(made)
    first = asyncio.create_task(refusal(check, "a1", "a"))
    while check._asked is None:
        await asyncio.sleep(0)
    asks = [asyncio.create_task(refusal(check, *what)) for what in (("a2", "a"), ("b1", "b"))]
    assert [(await ask).message for ask in (first, *asks)] == ["0", "2", "1"]


async def test_one_tenant_may_have_so_many_waiting_and_others_go_on(made):
    check = counting(made, max_waiting=2, retry_after_ms=1234)
    asks = [asyncio.create_task(refusal(check, name, "a")) for name in "12"]
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity) as caught:
        await check.check("a", "3")
    assert (caught.value.reason, caught.value.retry_after_ms) == ("schema_check_busy", 1234)
    same = asyncio.create_task(refusal(check, "2", "a"))  # takes no place of its own
    assert (await refusal(check, "3", "b")).message == "1"
    assert [(await ask).message for ask in (*asks, same)] == ["0", "2", "2"]
    assert (await refusal(check, "3", "a")).message == "3"


async def test_a_caller_that_leaves_ends_no_process_and_no_check_of_others(made):
    check = made(sys.executable, "-c", "import time\ntime.sleep(0.5)\n" + COUNTING)
    leaving, second, waiting = (asyncio.create_task(refusal(check, name)) for name in "acb")
    with_it, with_second = (asyncio.create_task(refusal(check, name)) for name in "ac")
    while process_of(check) is None:
        await asyncio.sleep(0.01)
    first = process_of(check)
    for task in (leaving, second, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [(await one).message for one in (with_it, with_second)] == ["0", "1"]
    # Nobody waited for b any more: it was not asked.
    assert (await refusal(check, "d")).message == "2"
    assert process_of(check) is first
    assert not check._jobs
    assert not check._waiting
    assert not len(check._room)


async def test_the_answer_for_one_that_left_is_remembered(made):
    check = counting(made)
    alone = asyncio.create_task(refusal(check, "a"))
    while process_of(check) is None:
        await asyncio.sleep(0.001)
    alone.cancel()
    assert (await refusal(check, "b")).message == "1"
    assert (await refusal(check, "a")).message == "0"


async def test_a_host_that_does_not_answer_and_one_that_has_no_process(made):
    with pytest.raises(NoCapacity) as busy:
        await made(sys.executable, "-c", SILENT, wait_s=0.2, retry_after_ms=77).check("acme", "{}")
    assert (busy.value.reason, busy.value.retry_after_ms) == ("schema_check_busy", 77)
    with pytest.raises(Unavailable) as none:
        await made("/nonexistent/python").check("acme", "{}")
    assert none.value.reason == "schema_check_failed"


async def test_a_wait_for_others_ends(made):
    """Both end by a limit: the first one's answer does not come, the second one's turn neither."""
    check = made(sys.executable, "-c", SILENT, wait_s=0.2)
    ends = await asyncio.gather(*(check.check(name, "{}") for name in "ab"), return_exceptions=True)
    assert [(type(end), end.reason) for end in ends] == [(NoCapacity, "schema_check_busy")] * 2


async def test_an_answer_that_cannot_be_read_ends_that_check_alone(made):
    check = made(sys.executable, "-c", 'import sys\nfor line in sys.stdin:\n print("nonsense", flush=True)')
    for name in "ab":
        with pytest.raises(GenlockError) as caught:
            await check.check("acme", name)
        assert caught.value.reason == "internal"


async def test_who_waits_when_the_gateway_stops_hears_so(made):
    check = made(sys.executable, "-c", SILENT)
    asks = [asyncio.create_task(check.check("acme", name)) for name in "ab"]
    while process_of(check) is None:
        await asyncio.sleep(0.001)
    await check.close()
    ends = await asyncio.gather(*asks, return_exceptions=True)
    assert [end.reason for end in ends] == ["draining", "draining"]


async def test_a_folder_where_the_gateway_stands_is_not_taken_for_its_modules(made, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    for name in ("__init__", "schema_check"):
        (tmp_path / "model" / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    await made().check("acme", '{"type": "object"}')
