"""Each rule for manifests, shown on manifests that break it and on those that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.manifests.rules import RULES, check
from tests.support.manifests import container, group, manifests, one

Documents = list[dict[str, Any]]
Change = Callable[[Documents], None]


def spec(documents: Documents, role: str = "prefill") -> dict[str, Any]:
    return group(documents, role)["template"]["spec"]


def cluster(documents: Documents) -> dict[str, Any]:
    return one(documents, "RayCluster")["spec"]


def gateway(documents: Documents) -> dict[str, Any]:
    return container(one(documents, "Deployment", "genlock-gateway")["spec"]["template"])


def settings(old: str, new: str) -> Change:
    def change(documents: Documents) -> None:
        data = one(documents, "ConfigMap")["data"]
        assert old in data["genlock.yaml"]
        data["genlock.yaml"] = data["genlock.yaml"].replace(old, new)

    return change


def without(kind: str, name: str = "") -> Change:
    def change(documents: Documents) -> None:
        documents.remove(one(documents, kind, name))

    return change


def put(where: Callable[[Documents], dict[str, Any]], **fields: Any) -> Change:
    return lambda documents: where(documents).update(fields)


def worker(documents: Documents) -> dict[str, Any]:
    return container(group(documents, "decode")["template"])


def variable(name: str, value: str) -> Change:
    return lambda documents: worker(documents)["env"].append({"name": name, "value": value})


def with_tls(documents: Documents) -> None:
    gateway(documents)["env"].append({"name": "GENLOCK_TLS_CERT_FILE", "value": "/etc/genlock/tls/tls.crt"})


def tls_without_a_mount(documents: Documents) -> None:
    with_tls(documents)
    for role in ("prefill", "decode"):
        container(group(documents, role)["template"])["env"].append({"name": "GENLOCK_CA", "value": "/nowhere/ca.crt"})


def port(name: str, number: int) -> Change:
    def change(documents: Documents) -> None:
        for entry in gateway(documents)["ports"]:
            if entry["name"] == name:
                entry["containerPort"] = number

    return change


def open_workers(**rule: Any) -> Change:
    return lambda documents: one(documents, "NetworkPolicy", "genlock-workers")["spec"]["ingress"].append(rule)


def budget(**fields: Any) -> Change:
    def change(documents: Documents) -> None:
        found = one(documents, "PodDisruptionBudget", "genlock-decode")["spec"]
        found.pop("minAvailable")
        found.update(fields)

    return change


def pre_stop(text: str) -> Change:
    return put(worker, lifecycle={"preStop": {"exec": {"command": ["/bin/sh", "-c", text]}}})


def limit(name: str, value: str) -> Change:
    return lambda documents: worker(documents)["resources"]["limits"].update({name: value})


def volume(name: str, **fields: Any) -> Change:
    def change(documents: Documents) -> None:
        volumes = spec(documents, "decode")["volumes"]
        volumes[:] = [entry for entry in volumes if entry["name"] != name]
        if fields:
            volumes.append({"name": name, **fields})

    return change


def right(**fields: Any) -> Change:
    return lambda documents: one(documents, "Role")["rules"][0].update(fields)


def controller(documents: Documents) -> dict[str, Any]:
    return one(documents, "Deployment", "genlock-controller")["spec"]


BROKEN: list[tuple[str, str, Change]] = [
    ("settings-load", "an unknown field", settings("page_tokens: 32", "page_token: 32")),
    ("settings-load", "an impossible value", settings("page_tokens: 32", "page_tokens: 33")),
    ("settings-load", "an unknown variable", variable("GENLOCK_CACHE_PAGES", "3")),
    ("settings-load", "no file", without("ConfigMap")),
    ("engine-reaches", "shared memory between pods", settings('engine: "nixl"', 'engine: "shm"')),
    ("listens-outside", "a loopback address", settings('host: "0.0.0.0"', 'host: "127.0.0.1"')),
    ("listens-outside", "one address for all workers",
     settings('  host: "auto"\n  port: 20000', '  host: "10.0.0.7"\n  port: 20000')),
    ("grace-above-drain", "a longer drain", settings("drain_timeout_ms: 120000", "drain_timeout_ms: 150001")),
    ("grace-above-drain", "a short grace", lambda d: spec(d).update(terminationGracePeriodSeconds=120)),
    ("grace-above-drain", "Kubernetes' default", lambda d: spec(d, "decode").pop("terminationGracePeriodSeconds")),
    ("grace-above-drain", "a drain limit of one group", variable("GENLOCK_WORKERS_DRAIN_TIMEOUT_MS", "600000")),
    ("workers-reachable", "a port of the system's choice", settings("port: 20000", "port: 0")),
    ("workers-reachable", "another port", settings("port: 20000", "port: 30000")),
    ("workers-reachable", "nobody let in",
     lambda d: one(d, "NetworkPolicy", "genlock-workers")["spec"].update(ingress=[])),
    ("roles-apart", "any pod", settings('resources: "{role}=1"', 'resources: ""')),
    ("workers-fit", "more CPUs than the pod has", settings("drain_timeout_ms", "cpus: 2.5\n  drain_timeout_ms")),
    ("workers-fit", "GPUs that no pod has", settings("drain_timeout_ms", "gpus: 1\n  drain_timeout_ms")),
    ("workers-fit", "more workers than the pod has room for",
     lambda d: group(d, "decode")["rayStartParams"].update(resources=json.dumps('{"decode": 5}'))),
    ("groups-alike", "another image", put(worker, image="genlock:0.0.9")),
    ("groups-alike", "another page size", variable("GENLOCK_CACHE_PAGE_TOKENS", "64")),
    ("groups-alike", "another settings file", volume("config", configMap={"name": "other"})),
    ("both-roles", "a missing group", lambda d: cluster(d)["workerGroupSpecs"].pop()),
    ("both-roles", "a resource by another name", lambda d: group(d, "decode")["rayStartParams"].pop("resources")),
    ("both-roles", "a resource that a shell takes apart",
     lambda d: group(d, "decode")["rayStartParams"].update(resources='{"decode": 1}')),
    ("replica-bounds", "a maximum below the minimum", lambda d: group(d, "decode").update(maxReplicas=0)),
    ("replica-bounds", "more than the maximum", lambda d: group(d, "prefill").update(replicas=9)),
    ("replicas-are-ours", "Ray's own autoscaler", lambda d: cluster(d).update(enableInTreeAutoscaling=True)),
    ("ray-auth", "no word about it", lambda d: cluster(d).pop("authOptions")),
    ("ray-auth", "authentication off", lambda d: cluster(d).update(authOptions={"mode": "disabled"})),
    ("controller-joins-ray", "processes that nobody shares",
     lambda d: controller(d)["template"]["spec"].pop("shareProcessNamespace")),
    ("controller-joins-ray", "certificates of KubeRay's", lambda d: cluster(d).update(tlsOptions={"enabled": True})),
    ("head-is-empty", "CPUs on the head", lambda d: cluster(d)["headGroupSpec"]["rayStartParams"].pop("num-cpus")),
    ("drain-before-stop", "no preStop", lambda d: worker(d).pop("lifecycle")),
    ("drain-before-stop", "a drain that nobody waits for", pre_stop('genlock drain "$POD_NAME"')),
    ("drain-before-stop", "a name that nobody expands", pre_stop("genlock drain $(POD_NAME) --wait")),
    ("drain-reaches", "TLS without a CA", with_tls),
    ("drain-reaches", "TLS in the settings file", settings("page_tokens: 32", "page_tokens: 32\ntls: {cert_file: a}")),
    ("drain-reaches", "a CA that nobody mounts", tls_without_a_mount),
    ("drain-reaches", "tenants without a token", settings('http_host: "0.0.0.0"', 'tenants_file: "/t.yaml"')),
    ("drain-reaches", "no Service of that name",
     lambda d: [e.update(value="elsewhere:1") for e in worker(d)["env"] if e["name"] == "GENLOCK_ENDPOINT"]),
    ("probes-hit-ports", "a moved port", port("grpc", 50052)),
    ("probes-hit-ports", "a moved HTTP port", port("http", 8080)),
    ("probes-hit-ports", "no readiness", lambda d: gateway(d).pop("readinessProbe")),
    ("shared-memory", "the container's own /dev/shm", volume("shm")),
    ("shared-memory", "a /dev/shm on disk", volume("shm", emptyDir={})),
    ("whole-devices", "GPUs that are only limited", limit("nvidia.com/gpu", "8")),
    ("whole-devices", "huge pages without a mount", limit("hugepages-2Mi", "1Gi")),
    ("not-root", "a pod of root's", lambda d: spec(d)["securityContext"].pop("runAsNonRoot")),
    ("not-root", "privilege to be had", lambda d: worker(d)["securityContext"].pop("allowPrivilegeEscalation")),
    ("not-root", "capabilities kept", lambda d: worker(d)["securityContext"].update(capabilities={"drop": []})),
    ("images-named", "latest", put(gateway, image="registry.example:5000/genlock:latest")),
    ("images-named", "no tag", put(gateway, image="registry.example:5000/genlock")),
    ("names-exist", "no such ConfigMap", without("ConfigMap")),
    ("names-exist", "no such account", without("ServiceAccount", "genlock-worker")),
    ("names-exist", "no such volume", volume("tmp")),
    ("secrets-by-reference", "a password in a variable", variable("GENLOCK_REGISTRY_PASSWORD", "hunter2")),
    ("secrets-by-reference", "a secret in the settings file",
     settings("page_tokens: 32", f"page_tokens: 32\ncluster:\n  secret: '{'0f' * 16}'")),
    ("secrets-by-reference", "a Secret with data",
     lambda d: d.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}})),
    ("services-hit-ports", "a port by another name", lambda d: gateway(d)["ports"].pop(0)),
    ("services-hit-ports", "nobody behind it",
     lambda d: one(d, "Service", "genlock-redis")["spec"].update(selector={"app": "redis"})),
    ("budgets-count", "a budget that Kubernetes ignores", budget(maxUnavailable=1)),
    ("budgets-count", "a percentage", budget(minAvailable="50%")),
    ("budgets-count", "nobody behind it", budget(minAvailable=1, selector={"matchLabels": {"a": "b"}})),
    ("transfer-fenced", "no policy", lambda d: [d.remove(p) for p in list(d) if p["kind"] == "NetworkPolicy"]),
    ("transfer-fenced", "open to everybody", open_workers()),
    ("transfer-fenced", "open to the gateway",
     open_workers(**{"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "gateway"}}}]})),
    ("transfer-fenced", "a wide range", open_workers(ports=[{"port": 1024, "endPort": 65535}])),
    ("transfer-fenced", "workers of all namespaces",
     open_workers(**{"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "decode"}},
                               "namespaceSelector": {}}]})),
    ("one-controller", "two of them", lambda d: controller(d).update(replicas=2)),
    ("one-controller", "two of them for a while", lambda d: controller(d).update(strategy={"type": "RollingUpdate"})),
    ("one-controller", "none", without("Deployment", "genlock-controller")),
    ("least-rights", "all clusters", lambda d: one(d, "Role")["rules"][0].pop("resourceNames")),
    ("least-rights", "delete", right(verbs=["get", "patch", "delete"])),
    ("least-rights", "delete of pods", lambda d: one(d, "Role")["rules"][1].update(verbs=["list", "delete"])),
    ("least-rights", "secrets", right(resources=["rayclusters", "secrets"])),
    ("least-rights", "a token for workers", lambda d: spec(d).pop("automountServiceAccountToken")),
    ("least-rights", "rights everywhere",
     lambda d: d.append({"kind": "ClusterRole", "metadata": {"name": "x"}, "rules": []})),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "what", "change"), BROKEN, ids=[f"{rule}-{what}" for rule, what, _ in BROKEN])
def test_a_rule_sees(rule: str, what: str, change: Change) -> None:
    documents = manifests()
    change(documents)
    found = [finding for finding in check(documents) if finding.rule == rule]
    assert found, what
    assert all(finding.where and finding.message for finding in found)


def test_every_rule_is_shown() -> None:
    assert {rule for rule, _what, _change in BROKEN} == set(RULES)


@pytest.mark.parametrize(
    "documents",
    [
        [],
        [{"kind": "RayCluster"}],
        [{"kind": "RayCluster", "spec": {"workerGroupSpecs": [None, {"template": None}, 3]}}],
        [{"kind": "Deployment", "metadata": None, "spec": {"template": {"spec": {"containers": "x"}}}}],
        [{"kind": "ConfigMap", "data": {"genlock.yaml": "a: ["}}, {"kind": "Role", "rules": [{"verbs": None}]}],
        [{"kind": "Role", "rules": [{"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": None}]}],
        [{"kind": "PodDisruptionBudget", "spec": None}, {"kind": "Deployment", "spec": None}],
        [{"kind": "Service", "spec": {"selector": None}}, {"kind": "PodDisruptionBudget"}, {"kind": "NetworkPolicy"}],
    ],
)
def test_odd_documents_are_findings_and_no_surprise(documents: Documents) -> None:
    assert check(documents)
