"""The chart renders with every shipped values file, and what comes out is what Kubernetes and KubeRay take."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cluster.cli.main import COMMANDS, cli
from cluster.config import load
from cluster.manifests.chart import assignment, merged, render
from cluster.manifests.rules import check
from kvstore.errors import InvalidInput
from tests.support import manifests as support
from tests.support.manifests import DEFAULTS, KUBERNETES, SHIPPED, container, group, manifests, need, one

CORE = ["v1", "apps/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1"]


def with_values(*assignments: str, name: str = "genlock") -> list[dict[str, Any]]:
    need("helm_python")
    values = merged(assignment(text) for text in assignments)
    return list(render(values, name=name, namespace="llm").documents)


def values_of(name: str) -> dict[str, Any]:
    return {} if name == DEFAULTS else dict(support.read_values(support.values_path(name)))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_rule_holds(name: str) -> None:
    assert check(manifests(name)) == ()


@pytest.mark.parametrize("name", SHIPPED)
def test_helm_lints_it(name: str) -> None:
    need("helm_python")
    import helm_python

    report = helm_python.lint(str(support.CHART), values_of(name), strict=True)
    assert report["errors"] == []
    assert [entry["error"] for entry in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    ("name", "version"), [*((name, KUBERNETES[1]) for name in SHIPPED), ("h100-8-nodes", KUBERNETES[0])]
)
def test_kubernetes_takes_its_own_kinds(name: str, version: str) -> None:
    need("kubernetes_validate")
    import kubernetes_validate

    core = [document for document in manifests(name) if document["apiVersion"] in CORE]
    assert len(core) >= 14
    for document in [*core, *pod_templates(manifests(name))]:
        kubernetes_validate.validate(document, version, strict=True)


def pod_templates(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spec = one(documents, "RayCluster")["spec"]
    templates = [spec["headGroupSpec"]["template"], *(entry["template"] for entry in spec["workerGroupSpecs"])]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        for template in templates
    ]


def test_kubernetes_refuses_what_it_does_not_know() -> None:
    need("kubernetes_validate")
    import kubernetes_validate

    template = pod_templates(manifests())[1]
    template["template"]["spec"]["terminationGracePeriodSecond"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(template, KUBERNETES[1], strict=True)


@pytest.mark.parametrize("name", SHIPPED)
def test_essentials_of_the_ray_cluster(name: str) -> None:
    need("jsonschema")
    schema = yaml.safe_load(support.ESSENTIALS.read_text())
    assert support.schema_errors(schema, one(manifests(name), "RayCluster")) == []


def broken_clusters() -> list[tuple[str, Any]]:
    def change(path: str, value: object) -> Any:
        def apply(cluster: dict[str, Any]) -> None:
            *way, last = path.split(".")
            for key in way:
                cluster = cluster[int(key)] if key.isdigit() else cluster[key]  # type: ignore[index]
            cluster[last] = value

        return apply

    return [
        ("mode", change("spec.authOptions.mode", "tokens")),
        ("replicas", change("spec.workerGroupSpecs.0.replicas", "2")),
        ("unknown", change("spec.workerGroupSpecs.0.scale", 2)),
        ("text", change("spec.headGroupSpec.rayStartParams.num-cpus", 0)),
        ("backend", change("spec.gcsFaultToleranceOptions.backend", "etcd")),
    ]


@pytest.mark.parametrize(("what", "apply"), broken_clusters())
def test_essentials_refuse(what: str, apply: Any) -> None:
    need("jsonschema")
    cluster = one(manifests(), "RayCluster")
    apply(cluster)
    assert support.schema_errors(yaml.safe_load(support.ESSENTIALS.read_text()), cluster), what
    if (path := support.crd_path()) is not None:
        assert support.schema_errors(support.strict(support.crd_schema(path)), cluster), what


def test_where_the_crd_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(support.CRD_VARIABLE, raising=False)
    here, beside, named = (tmp_path / name for name in ("here", "beside", "named"))
    assert support.crd_path((here, beside)) is None
    beside.touch()
    assert support.crd_path((here, beside)) == beside
    here.touch()
    assert support.crd_path((here, beside)) == here
    monkeypatch.setenv(support.CRD_VARIABLE, str(named))
    assert support.crd_path((here, beside)) is None, "what was named counts alone"
    named.touch()
    assert support.crd_path((here, beside)) == named
    assert [path.parent.relative_to(support.ROOT.parent).as_posix() for path in support.CRD_PLACES] == [
        f"{support.ROOT.name}/deploy/crds", "shared/crds",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_the_crd_itself(name: str) -> None:
    path = support.crd_path()
    if path is None:
        pytest.skip(
            f"KubeRay's CRD is not here: name it in {support.CRD_VARIABLE} or put it at one of {support.CRD_PLACES}"
        )
    need("jsonschema")
    need("cel")
    schema = support.crd_schema(path)
    cluster = support.with_defaults(one(manifests(name), "RayCluster"), schema)
    cluster["metadata"] = {"name": "genlock"}
    open_metadata = support.strict(schema)
    open_metadata["properties"]["metadata"] = {"type": "object"}
    assert support.schema_errors(open_metadata, cluster) == []
    assert list(support.cel_errors(schema, cluster)) == []
    cluster["spec"]["managedBy"] = "somebody"
    assert list(support.cel_errors(schema, cluster))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_settings_file_says_what_the_values_say(name: str) -> None:
    documents = manifests(name)
    text = one(documents, "ConfigMap")["data"]["genlock.yaml"]
    loaded = load(file_text=text)
    given = values_of(name).get("settings", {})
    for section, fields in given.items():
        for field, value in fields.items():
            assert getattr(getattr(loaded.config, section), field) == value
    assert loaded.config.workers.prefill == group(documents, "prefill")["replicas"]
    assert loaded.config.api.http_port == 8000


def test_large_numbers_stay_numbers() -> None:
    documents = with_values("settings.cache.prefill_pages=4194304", "settings.workers.cpus=0.25")
    config = load(file_text=one(documents, "ConfigMap")["data"]["genlock.yaml"]).config
    assert (config.cache.prefill_pages, config.workers.cpus) == (4194304, 0.25)


def test_grace_follows_the_drain_limit() -> None:
    documents = with_values("settings.workers.drain_timeout_ms=600001", "terminationMarginSeconds=60")
    for role in ("prefill", "decode"):
        assert group(documents, role)["template"]["spec"]["terminationGracePeriodSeconds"] == 601 + 60
    gateway = one(documents, "Deployment", "genlock-gateway")["spec"]["template"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] == 601 + 60 + 10


def test_one_group_may_differ_in_size_only() -> None:
    documents = with_values("prefill.cpu=8", "prefill.gpus=8", "prefill.workersPerPod=2", "decode.gpus=4")
    sizes = [container(group(documents, role)["template"])["resources"]["limits"] for role in ("prefill", "decode")]
    assert [(size["cpu"], size["nvidia.com/gpu"]) for size in sizes] == [("8", "8"), ("2", "4")]
    assert check(documents) == ()
    assert load(file_text=one(documents, "ConfigMap")["data"]["genlock.yaml"]).config.workers.gpus == 4


def test_an_external_registry() -> None:
    documents = with_values("redis.bundled=false", "redis.address=cache.example:6380", "redis.tls=true")
    assert not [document for document in documents if document["kind"] == "StatefulSet"]
    options = one(documents, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://cache.example:6380"
    variables = container(group(documents, "decode")["template"])["env"]
    assert {"name": "GENLOCK_REGISTRY_URL", "value": "rediss://cache.example:6380/0"} in variables


def test_tls_comes_from_a_secret() -> None:
    documents = with_values("tls.secretName=genlock-tls")
    for where in (one(documents, "Deployment", "genlock-gateway")["spec"], group(documents, "decode")):
        pod = where["template"]["spec"]
        assert {"name": "tls", "secret": {"secretName": "genlock-tls", "defaultMode": 0o440}} in pod["volumes"]
        entry = container(where["template"])
        assert {"name": "tls", "mountPath": "/etc/genlock/tls", "readOnly": True} in entry["volumeMounts"]
        assert {"name": "GENLOCK_TLS_KEY_FILE", "value": "/etc/genlock/tls/tls.key"} in entry["env"]
    # The preStop hook's drain calls the gateway over TLS.
    for role in ("prefill", "decode"):
        assert {"name": "GENLOCK_CA", "value": "/etc/genlock/tls/ca.crt"} in container(
            group(documents, role)["template"]
        )["env"]
    assert check(documents) == ()


@pytest.mark.parametrize(("flags", "scheme"), [((), "HTTP"), (("tls.secretName=genlock-tls",), "HTTPS")])
def test_a_gateway_without_workers_is_not_ready_and_not_restarted(flags: tuple[str, ...], scheme: str) -> None:
    """Workers may take far longer to start than a start-up probe waits."""
    documents = with_values(*flags)
    gateway = container(one(documents, "Deployment", "genlock-gateway")["spec"]["template"])
    api = load(file_text=one(documents, "ConfigMap")["data"]["genlock.yaml"]).config.api
    for probe in ("startupProbe", "livenessProbe"):
        assert gateway[probe]["httpGet"] == {"path": "/healthz", "port": api.http_port, "scheme": scheme}
    ready = gateway["readinessProbe"]
    if flags:  # the kubelet's gRPC probe speaks no TLS
        assert ready["httpGet"] == {"path": "/readyz", "port": api.http_port, "scheme": "HTTPS"}
    else:
        assert ready["grpc"] == {"port": api.port}
    assert "tcpSocket" not in ready, "an open port says nothing of workers and drains"


def test_who_asks_for_tenants_can_read_them() -> None:
    documents = with_values("tenants.secretName=genlock-tenants")
    path = load(file_text=one(documents, "ConfigMap")["data"]["genlock.yaml"]).config.api.tenants_file
    for name in ("gateway", "controller"):
        entry = container(one(documents, "Deployment", f"genlock-{name}")["spec"]["template"])
        assert any(path.startswith(mount["mountPath"] + "/") for mount in entry["volumeMounts"])
    variables = container(group(documents, "decode")["template"])["env"]
    token = next(variable for variable in variables if variable["name"] == "GENLOCK_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "genlock-secrets", "key": "operator-token"}
    assert check(documents) == ()


def test_monitors_find_what_they_scrape() -> None:
    """The port names that monitors ask for are declared, and alerts know the job."""
    documents = with_values("serviceMonitor.enabled=true", name="blue")
    service = one(documents, "Service", "blue-genlock-gateway")
    monitor, pods = one(documents, "ServiceMonitor")["spec"], one(documents, "PodMonitor", "blue-genlock-ray")["spec"]
    names = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= names
    worker = {port["name"] for port in container(group(documents, "decode")["template"])["ports"]}
    assert {endpoint["port"] for endpoint in pods["podMetricsEndpoints"]} == {"metrics", "ray-metrics"} <= worker
    labels = group(documents, "decode")["template"]["metadata"]["labels"]
    assert labels[pods["jobLabel"]] == service["metadata"]["labels"][monitor["jobLabel"]] == "genlock"


def test_the_controller_is_scraped_wherever_its_actor_runs() -> None:
    documents = with_values("serviceMonitor.enabled=true", "ports.metrics=9999", name="blue")
    assert load(file_text=one(documents, "ConfigMap")["data"]["genlock.yaml"]).config.metrics.controller_port == 9999
    monitor = one(documents, "PodMonitor", "blue-genlock-controller")["spec"]
    [chosen] = monitor["selector"]["matchExpressions"]
    assert chosen["values"] == ["head", "controller"]
    head = one(documents, "RayCluster")["spec"]["headGroupSpec"]["template"]
    controller = one(documents, "Deployment", "blue-genlock-controller")["spec"]["template"]
    for template in (head, controller):
        assert {"name": "metrics", "containerPort": 9999} in container(template)["ports"]
        assert template["metadata"]["labels"]["app.kubernetes.io/component"] in chosen["values"]
    # Where the actor does not run nobody listens, which is no alert.
    job = re.search(r'job=~"([^"]+)"', (support.ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert monitor["jobLabel"] == "app.kubernetes.io/component"
    assert job
    assert not any(re.fullmatch(job[1], component) for component in chosen["values"])
    endpoints = one(documents, "PodMonitor", "blue-genlock-ray")["spec"]["podMetricsEndpoints"]
    metrics = next(endpoint for endpoint in endpoints if endpoint["port"] == "metrics")
    assert [(rule["action"], rule["regex"]) for rule in metrics["relabelings"]] == [("drop", "head")]
    for name in ("head", "controller"):
        [*_, rule] = one(documents, "NetworkPolicy", f"blue-genlock-{name}")["spec"]["ingress"]
        assert {"port": 9999} in rule["ports"]


def test_the_drain_waits_no_longer_than_the_grace() -> None:
    documents = with_values("settings.workers.drain_timeout_ms=300000")
    spec = group(documents, "decode")["template"]["spec"]
    line = shlex.split(container({"spec": spec})["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert line[:4] == ["exec", "genlock", "drain", "$POD_NAME"]
    assert int(line[line.index("--wait-timeout") + 1]) == 300 < spec["terminationGracePeriodSeconds"]


def test_another_release_name_reaches_everything() -> None:
    documents = with_values(name="blue")
    assert check(documents) == ()
    assert all(document["metadata"]["name"].startswith("blue-genlock") for document in documents)
    assert one(documents, "Role")["rules"][0]["resourceNames"] == ["blue-genlock"]


def test_a_group_may_go_to_zero_but_does_not_begin_there() -> None:
    documents = with_values("prefill.minReplicas=0", "decode.minReplicas=0")
    assert check(documents) == ()
    for role in ("prefill", "decode"):
        made = group(documents, role)
        assert (made["minReplicas"], made["replicas"]) == (0, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("image.tag=latest", "/image/tag"),
        ("prefill.replicas=0", "/prefill/replicas"),
        ("prefil.replicas=1", "prefil"),
        ("prefill.maxReplicas=1 prefill.minReplicas=2", "prefill.maxReplicas must not be below"),
        ("settings.cluster.secret='00'", "/settings/cluster"),
        ("terminationMarginSeconds=0", "/terminationMarginSeconds"),
        ("redis.bundled=false", "redis.address (host:port) is needed"),
        ("prefill.hugepages2Mi=many", "/prefill/hugepages2Mi"),
        ("ports.grpc=70000", "/ports/grpc"),
        ("prefill.gpus=8 decode.gpus=4", "as many GPUs for one worker"),
    ],
)
def test_values_that_the_chart_refuses(change: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        with_values(*change.split())
    assert says in caught.value.message


def test_the_schema_knows_every_default() -> None:
    """A value without a rule would be taken whatever it is."""
    schema = json.loads((support.CHART / "values.schema.json").read_text())
    values = yaml.safe_load((support.CHART / "values.yaml").read_text())

    def walk(value: Any, rules: dict[str, Any], path: str) -> list[str]:
        rules = schema["definitions"]["group"] if "$ref" in rules else rules
        if not isinstance(value, dict) or "properties" not in rules or rules.get("additionalProperties") is not False:
            return []
        missing = [f"{path}.{key}" for key in set(value) ^ set(rules["properties"]) - {"global"}]
        return missing + [
            name
            for key, entry in value.items()
            if key in rules["properties"]
            for name in walk(entry, rules["properties"][key], f"{path}.{key}")
        ]

    assert walk(values, schema, "") == []


def test_ray_knows_its_flags() -> None:
    documents = manifests("h100-8-nodes")
    cluster = one(documents, "RayCluster")["spec"]
    flags = {
        f"--{flag}"
        for entry in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for flag in entry["rayStartParams"]
    }
    sidecar = one(documents, "Deployment", "genlock-controller")["spec"]["template"]["spec"]["initContainers"][0]
    flags |= {word.split("=")[0] for word in sidecar["args"][0].split() if word.startswith("--")}
    assert "--address" in flags
    assert "--num-cpus" in flags
    assert flags <= support.ray_flags()


@pytest.mark.parametrize("name", SHIPPED)
def test_commands_in_manifests_are_commands(name: str) -> None:
    """What containers run is what the command line knows."""
    lines = genlock_lines(manifests(name))
    for command, *arguments in lines:
        if command in COMMANDS:
            known = cli.get_command(click.Context(cli), command)
            assert known is not None
            known.make_context(command, list(arguments))
    missing = sorted({line[0] for line in lines} - set(COMMANDS))
    if missing:
        pytest.skip(f"not part of this version: genlock {', '.join(missing)}")


def genlock_lines(documents: list[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for document in documents:
        if document["kind"] == "Deployment":
            entry = container(document["spec"]["template"])
            lines.append(entry["args"])
    for role in ("prefill", "decode"):
        command = container(group(documents, role)["template"])["lifecycle"]["preStop"]["exec"]["command"]
        lines.append(shlex.split(command[-1].removeprefix("exec genlock ")))
    return lines


def test_the_controller_owns_the_replicas_of_its_own_cluster() -> None:
    documents = manifests("h100-8-nodes")
    text = one(documents, "ConfigMap")["data"]["genlock.yaml"]
    kube = load(file_text=text).config.kube
    cluster = one(documents, "RayCluster")
    assert (kube.enabled, kube.cluster) == (True, cluster["metadata"]["name"])
    assert [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]] == [
        kube.prefill_group,
        kube.decode_group,
    ]
    # Its actor runs where a pod has the account: at the head and in its own pod.
    assert "controller" in cluster["spec"]["headGroupSpec"]["rayStartParams"]["resources"]
    pod = one(documents, "Deployment", "genlock-controller")["spec"]["template"]["spec"]
    assert """--resources='{"controller": 1}'""" in pod["initContainers"][0]["args"][0]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_object_store_has_room_in_shared_memory(name: str) -> None:
    """Else Ray puts it on disk and warns at each node's start. Without the flag it takes 30 % of the memory."""
    documents = manifests(name)
    cluster = one(documents, "RayCluster")["spec"]
    starts = [
        (entry["rayStartParams"]["object-store-memory"], entry["template"]["spec"])
        for entry in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    pod = one(documents, "Deployment", "genlock-controller")["spec"]["template"]["spec"]
    flag = re.search(r"--object-store-memory=(\d+)", pod["initContainers"][0]["args"][0])
    assert flag is not None
    for store, spec in [*starts, (flag[1], pod)]:
        shm = next(volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if volume["name"] == "shm")
        room = int(shm[:-2]) << {"Mi": 20, "Gi": 30}[shm[-2:]]
        # Ray accepts no less than 75 MiB.
        assert 75 << 20 <= int(store) <= room // 2


def test_the_controller_starts_when_its_node_of_ray_can_be_found(tmp_path: Path) -> None:
    """Its socket is there seconds before `ray start` writes where the cluster is; both outlive a node that ended."""
    pod = one(manifests(), "Deployment", "genlock-controller")["spec"]["template"]["spec"]
    shell, option, text = pod["initContainers"][0]["startupProbe"]["exec"]["command"]
    found, answer = tmp_path / "ray_current_cluster", tmp_path / "wget"
    text = text.replace("/tmp/ray/ray_current_cluster", str(found))

    def ready() -> bool:
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run([shell, option, text], env={"PATH": path}, timeout=30, check=False).returncode == 0

    answer.write_text("#!/bin/sh\necho success\n")
    answer.chmod(0o755)
    assert not ready(), "`ray start` has not come to its end"
    found.write_text("10.0.0.1:6379")
    assert ready()
    answer.write_text("#!/bin/sh\nexit 4\n")
    assert not ready(), "the file is of a node that ended"
