"""What `genlock doctor` makes of what it finds: versions, libraries, Ray, clocks, listeners."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from cluster.cli import doctor_parts
from cluster.cli.doctor_exposure import is_loopback, judge, nixl_devices
from cluster.cli.doctor_finding import FAIL, OK, SKIP, WARN, Finding
from cluster.cli.doctor_parts import engines, judge_clock, judge_engine, judge_ray, judge_versions, versions
from cluster.cli.doctor_probe import Answer, ask, verdict
from cluster.config import load

# --- questions in a process of their own ------------------------------------------------------------------------------


def test_a_question_is_answered() -> None:
    assert ask("print('noise'); answer = {'a': 1}") == Answer({"a": 1})


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashes its process (SIGSEGV)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os; os._exit(7)", "ends with code 7"),
        ("answer = object()", "not JSON serializable"),
        ("import time; time.sleep(60)", "does not answer within 0.5 s"),
    ],
)
def test_a_question_that_ends_badly_says_how(question: str, says: str) -> None:
    began = time.monotonic()
    found = ask(question, 0.5 if "sleep" in question else 30.0)
    assert found.value is None
    assert says in found.error
    assert time.monotonic() - began < 30


def test_a_crash_after_the_answer_is_a_crash() -> None:
    assert verdict(-11, "genlock-doctor:1", "").error == "crashes its process (SIGSEGV)"


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "answer", "result"),
    [
        (True, Answer(""), OK),
        (True, None, FAIL),
        (False, None, SKIP),
        (True, Answer("libibverbs.so.1: cannot open"), FAIL),
        (False, Answer("libibverbs.so.1: cannot open"), WARN),
        (True, Answer(error="crashes its process (SIGSEGV)"), FAIL),
    ],
)
def test_an_engine_counts_when_its_library_loads(chosen: bool, answer: Answer | None, result: str) -> None:
    found = judge_engine("mooncake", chosen, answer, "apt-get install libibverbs1")
    assert (found.check, found.result) == ("engine mooncake", result)
    assert bool(found.fix) == (result in (FAIL, WARN))


def test_a_library_that_is_there_and_does_not_load_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is found, its import crashes: looking for it would not tell."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {one.check: one for one in engines(load(flags={"transfer.engine": "mooncake"}).config)}
    assert found["engine mooncake"].result == FAIL
    assert "SIGABRT" in found["engine mooncake"].detail


# --- versions ---------------------------------------------------------------------------------------------------------

WANTED = ["ray==2.60.0", "numpy<3,>=2.1", "nixl-cu12==1.5.1; extra == 'nixl'", "redis<9,>=8.1"]


def test_versions_are_held_against_what_the_package_asks_for() -> None:
    installed = {"ray": "2.59.0", "numpy": "2.5.1", "nixl-cu12": "1.4.0"}
    found = {one.check: one for one in judge_versions(WANTED, installed)}
    assert (found["ray"].result, found["redis"].result, found["nixl-cu12"].result) == (WARN, FAIL, WARN)
    assert "2.59.0; genlock is made for ==2.60.0" in found["ray"].detail
    assert found["redis"].fix == "pip install 'redis<9,>=8.1'"
    assert found["other libraries"].detail.startswith("1 fit")


def test_versions_that_fit_and_extras_that_are_missing_are_fine() -> None:
    found = list(judge_versions(WANTED, {"ray": "2.60.0", "numpy": "2.5.1", "redis": "8.1.0"}))
    assert {one.result for one in found} == {OK}
    assert [one.detail for one in found if one.check == "ray"] == ["2.60.0"]


def test_this_installation_fits() -> None:
    assert {one.result for one in versions(load().config)} == {OK}


def test_every_requirement_of_the_installed_package_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_parts, "_installed", lambda name: "0.0.1")
    found = {one.check: one.result for one in versions(load().config)}
    for name in ("torch", "ray", "numpy", "grpcio", "nixl-cu12"):
        assert found[name] == WARN
    assert found["other libraries"] == OK


def test_another_python_and_a_package_that_is_not_installed_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor_parts.sys, "version_info", (3, 12, 1, "final", 0))
    monkeypatch.setattr(doctor_parts.importlib.metadata, "version", version)
    found = {one.check: one for one in versions(load().config)}
    assert {name: one.result for name, one in found.items()} == {"python": FAIL, "genlock": FAIL}
    assert found["python"].detail == "3.12.1"
    assert all(one.fix for one in found.values())


# --- Ray --------------------------------------------------------------------------------------------------------------


def ray_answer(address: str = "10.0.0.2:6379", ray: str = "2.60.0", python: str = "3.11.7") -> Answer:
    cluster = {"ray_version": ray, "python_version": python} if ray else {}
    return Answer({"ours": "2.60.0", "address": address, "cluster": cluster})


@pytest.mark.parametrize(
    ("wanted", "answer", "result", "says"),
    [
        ("auto", ray_answer(), OK, "auto is 10.0.0.2:6379 answers: Ray 2.60.0 with Python 3.11.7"),
        ("10.0.0.2:6379", ray_answer(), OK, "10.0.0.2:6379 answers"),
        ("auto", ray_answer(address=""), FAIL, "no Ray runs on this host"),
        ("auto", ray_answer(ray="2.58.0"), FAIL, "runs Ray 2.58.0 with Python 3.11.7, this host Ray 2.60.0"),
        ("auto", ray_answer(python="3.12.1"), FAIL, "with Python 3.12.1"),
        ("auto", ray_answer(ray=""), WARN, "does not say its version"),
        ("10.0.0.2:6379", Answer(error="Connection refused"), FAIL, "Connection refused"),
    ],
)
def test_the_ray_that_is_meant_is_there_and_is_ours(wanted: str, answer: Answer, result: str, says: str) -> None:
    found = judge_ray(wanted, answer, "3.11.7")
    assert (found.check, found.result) == ("ray cluster", result)
    assert says in found.detail
    assert bool(found.fix) == (result != OK)


def test_auto_without_a_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not asked in earnest: Ray looks through this host's processes, and there may be one of somebody else's."""
    asked: list[str] = []
    monkeypatch.setattr(doctor_parts, "ask", lambda question: asked.append(question) or ray_answer(address=""))
    [found] = doctor_parts.ray(load(flags={"control.ray_address": "auto"}).config)
    assert found.result == FAIL
    assert "get_ray_address_from_environment" in asked[0]
    [found] = doctor_parts.ray(load().config)
    assert found.result == OK
    assert "starts a Ray of its own" in found.detail


# --- the registry's clock ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs_ms", "took_ms", "result", "says"),
    [
        (100_000, 10, OK, "5 ms ahead of the registry's, ±5 ms"),
        (98_000, 10, WARN, "2005 ms ahead of"),
        (102_500, 10, WARN, "2495 ms behind"),
        (99_500, 4_000, OK, "2500 ms ahead of the registry's, ±2000 ms"),
    ],
)
def test_clocks_are_compared_as_far_as_the_call_lets_them(
    theirs_ms: float, took_ms: float, result: str, says: str
) -> None:
    found = judge_clock(100_000, took_ms, theirs_ms)
    assert found.result == result
    assert says in found.detail


# --- listeners --------------------------------------------------------------------------------------------------------


def listeners(devices: str | None = "", **flags: object) -> dict[str, Finding]:
    config = load(flags={name.replace("__", "."): value for name, value in flags.items()}).config
    return {one.check: one for one in judge(config, devices)}


@pytest.mark.parametrize(
    ("flags", "result"),
    [
        ({}, WARN),
        ({"api__tenants_file": "tenants.yaml"}, OK),
        ({"auth__registry_keys": True}, OK),
        ({"auth__issuer": "https://id.example", "auth__jwks": "keys.json"}, OK),
    ],
)
def test_a_front_door_with_any_source_of_credentials_is_fine(flags: dict[str, object], result: str) -> None:
    assert listeners(api__host="0.0.0.0", **flags)["front door"].result == result


@pytest.mark.parametrize(
    ("engine", "host", "devices", "says"),
    [
        ("shm", "127.0.0.1", None, None),
        ("nixl", "127.0.0.1", "lo", None),
        ("nixl", "127.0.0.1", "", "listens on all interfaces"),
        ("nixl", "0.0.0.0", "", "listens on all interfaces"),
        ("nixl", "10.0.0.7", "eth0,mlx5_0:1", "listens on eth0,mlx5_0:1"),
        ("nixl", "auto", None, "is decided where"),
        ("mooncake", "127.0.0.1", None, "listens on 0.0.0.0, whatever workers.host is (127.0.0.1)"),
        ("mooncake", "10.0.0.7", None, "listens on 0.0.0.0"),
    ],
)
def test_a_transfer_listener_that_others_reach_is_told(
    engine: str, host: str, devices: str | None, says: str | None
) -> None:
    found = listeners(devices, transfer__engine=engine, workers__host=host).get("transfer listener")
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert (found.result, says in found.detail, bool(found.fix)) == (WARN, True, True), found


def test_the_devices_of_nixl_are_those_that_a_worker_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert nixl_devices(load(flags={"transfer.engine": "nixl"}).config) == "lo"
    assert nixl_devices(load(flags={"transfer.engine": "nixl", "workers.host": "0.0.0.0"}).config) == ""
    assert nixl_devices(load().config) is None
    for given, counts in (("eth7", "eth7"), ("all", "")):
        monkeypatch.setenv("UCX_NET_DEVICES", given)
        assert nixl_devices(load(flags={"transfer.engine": "nixl"}).config) == counts


@pytest.mark.parametrize("port", ["port", "worker_port", "controller_port"])
def test_metrics_that_others_reach_are_told(port: str) -> None:
    assert listeners(metrics__host="0.0.0.0").get("metrics") is None, "they are off"
    for number in (0, 9464):  # 0: any free port
        assert listeners(metrics__host="0.0.0.0", **{f"metrics__{port}": number})["metrics"].result == WARN
        assert "metrics" not in listeners(metrics__host="127.0.0.1", **{f"metrics__{port}": number})


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.7", "auto")))
