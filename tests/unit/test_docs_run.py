"""Every command of the documents is run by a test, or stands here with the reason why not."""

from __future__ import annotations

import re

from tests.support.documents import ROOT, Block, all_blocks, bare

# Command -> why it is not run, and the tests that hold what can be held of it. A command that is run, or that no
# document has any more, may not stand here.
EXCEPTED: dict[str, tuple[str, str]] = {
    "docker build -f deploy/Dockerfile --target cpu -t genlock:0.1.0-cpu .": (
        "a daemon and base images are needed; the file is parsed, its sources and packages are looked for",
        "tests/deploy/test_image.py::test_the_dockerfile_is_sound",
    ),
    "docker build -f deploy/Dockerfile --target cuda -t genlock:0.1.0-cuda .": (
        "as for the target cpu",
        "tests/deploy/test_image.py::test_the_dockerfile_is_sound",
    ),
    "kind create cluster --name genlock": (
        "it starts a node as a container: a daemon and its image are needed; what is then asked of Kubernetes is asked "
        "of an emulated API",
        "tests/integration/test_docs_places.py::test_kubectl_of_the_deployment_guide",
    ),
    "kind load docker-image genlock:0.1.0-cpu --name genlock": (
        "it needs that node, and the image",
        "tests/deploy/test_image.py::test_the_build_sees_what_the_wheel_needs_and_no_more",
    ),
    "helm repo add kuberay https://ray-project.github.io/kuberay-helm/": (
        "it fetches from that address; tests ask no host but this one",
        "tests/deploy/test_chart.py",
    ),
    "helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0": (
        "it installs what others wrote into a cluster that is none here; the RayCluster is judged by schemas",
        "tests/deploy/test_chart.py",
    ),
    "kubectl -n llm port-forward service/genlock-gateway 50051 8000 &": (
        "behind the emulated API there is no pod to which a stream could go; the ports are the Service's",
        "tests/deploy/test_rules.py",
    ),
    **dict.fromkeys(
        (
            "genlock up --config cluster.yaml",
            "genlock gateway --config cluster.yaml --port 50052",
            "genlock status --endpoint 127.0.0.1:50052",
        ),
        (
            "two processes that stay in the foreground, and a third that asks one of them",
            "tests/integration/test_registry.py::"
            "test_two_gateway_processes_serve_the_same_workers_and_one_outlives_the_other",
        ),
    ),
    **dict.fromkeys(
        (
            "curl http://127.0.0.1:9464/metrics",
            "curl http://127.0.0.1:9464/targets",
            "curl http://127.0.0.1:9466/metrics",
        ),
        (
            "ports that are off by default, of processes that run for it alone",
            "tests/integration/test_telemetry_processes.py::test_every_process_tells_what_it_does_and_quotes_nobody",
        ),
    ),
    "genlock sim --seeds 0:2000 --controls": (
        "it takes minutes; each control is played until its law breaks",
        "tests/sim/test_sim_controls.py::test_without_a_check_a_law_breaks",
    ),
}


def commands(blocks: list[Block], *, run: bool) -> set[str]:
    return {bare(command) for block in blocks if block.run is run and not block.python for command in block.commands}


def unaccounted(blocks: list[Block], excepted: dict[str, tuple[str, str]]) -> tuple[set[str], set[str]]:
    """Commands that are neither run nor excepted, and exceptions that are run or are in no document."""
    ran, shown = commands(blocks, run=True), commands(blocks, run=False)
    left = shown - ran
    return left - excepted.keys(), excepted.keys() - left


def test_every_command_is_run_or_excepted() -> None:
    blocks = all_blocks()
    missed, stale = unaccounted(blocks, EXCEPTED)
    assert not missed, "mark their blocks with <!-- run ... -->, or say in EXCEPTED why they cannot be run"
    assert not stale, "they are run, or gone: take them out of EXCEPTED"
    ran, excepted = commands(blocks, run=True), commands(blocks, run=False) & EXCEPTED.keys()
    every = [bare(command) for block in blocks if not block.python for command in block.commands]
    print(f"{len(every)} commands: {sum(one in ran for one in every)} run, {sum(one in excepted for one in every)} not")
    assert len(ran) + len(excepted) == len(set(every))
    assert len(excepted) == len(EXCEPTED)


def test_every_python_block_is_run() -> None:
    assert not [block.where for block in all_blocks() if block.python and not block.run]


def test_what_holds_an_exception_is_there() -> None:
    for command, (reason, held_by) in EXCEPTED.items():
        path, _, name = held_by.partition("::")
        text = (ROOT / path).read_text()
        assert reason, command
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), held_by


def test_a_command_that_nobody_runs_is_seen_and_so_is_a_stale_exception() -> None:
    blocks = [
        Block("x.md:1", "", ("genlock status", "genlock up   # stays"), True),
        Block("x.md:9", "", ("genlock up", "kind delete"), False),
    ]
    why = ("", "")
    assert unaccounted(blocks, {}) == ({"kind delete"}, set())
    assert unaccounted(blocks, {"kind delete": why}) == (set(), set())
    assert unaccounted(blocks, {"kind delete": why, "genlock status": why}) == (set(), {"genlock status"})
    assert unaccounted(blocks[:1], {"kind delete": why}) == (set(), {"kind delete"})
