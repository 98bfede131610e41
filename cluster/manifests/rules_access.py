"""Rules about secrets, networks, budgets and rights. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.config import SETTINGS_TEXT
from cluster.manifests.rules_settings import SETTINGS_KEY, configs
from cluster.manifests.view import Document, Pod, env, get, items, name_of, of_kind, plain_env, pods, selects
from cluster.settings import Config
from kvstore.errors import InvalidInput

_SECRET_NAME = re.compile(r"(SECRET|PASSWORD|TOKEN|_KEY)$")
# Ports that a port range may span toward workers: more would reach ports of transfer engines.
MAX_SPAN = 1000

_CERTIFICATES = frozenset({"GENLOCK_TLS_CERT_FILE", "GENLOCK_TLS_API_CERT_FILE"})

Found = Iterator[tuple[str, str]]


def secrets_by_reference(documents: Sequence[Document]) -> Found:
    """No manifest holds a secret: not a Secret's data, not a variable's value, not a field of the settings file."""
    for document in of_kind(documents, "Secret"):
        if document.get("data") or document.get("stringData"):
            yield name_of(document), "holds secret data: make the Secret outside and name it"
    for pod in pods(documents):
        for container in pod.containers:
            for entry in env(container):
                if _SECRET_NAME.search(str(entry.get("name"))) and entry.get("value"):
                    yield pod.where, f"{entry.get('name')} has a plain value: use valueFrom.secretKeyRef"
    for document in of_kind(documents, "ConfigMap"):
        for key in _secret_settings(get(document, "data", SETTINGS_KEY, default="")):
            yield name_of(document), f"{key} stands in the settings file: give it by a variable from a Secret"


def _secret_settings(text: object) -> Iterator[str]:
    try:
        tree = SETTINGS_TEXT.tree(text) if isinstance(text, str) else None
    except InvalidInput:
        return  # `settings_load` tells it
    defaults = Config()
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(getattr(defaults, section.name)):
            if field.metadata["secret"] and get(tree, section.name, field.name):
                yield f"{section.name}.{field.name}"


def services_hit_ports(documents: Sequence[Document]) -> Found:
    """A Service selects pods of the manifests, and its target ports are declared by them."""
    for service in of_kind(documents, "Service"):
        selector = get(service, "spec", "selector", default={})
        chosen = [pod for pod in pods(documents) if selects({"matchLabels": selector}, pod.labels)]
        if not selector or not chosen:
            yield name_of(service), "selects no pod"
        for pod in chosen:
            declared = [port for container in pod.containers for port in items(container, "ports")]
            known = {port.get("name") for port in declared} | {port.get("containerPort") for port in declared}
            for port in items(service, "spec", "ports"):
                target = port.get("targetPort", port.get("port"))
                if target not in known:
                    yield name_of(service), f"targetPort {target} is not declared by {pod.where}"


def budgets_count(documents: Sequence[Document]) -> Found:
    """Budgets select pods. For those of a RayCluster Kubernetes takes nothing but a number as minAvailable."""
    for budget in of_kind(documents, "PodDisruptionBudget"):
        spec = get(budget, "spec", default={})
        chosen = [pod for pod in pods(documents) if selects(get(spec, "selector", default={}), pod.labels)]
        if not chosen:
            yield name_of(budget), "selects no pod"
        least = spec.get("minAvailable")
        if any(pod.kind == "RayCluster" for pod in chosen) and (type(least) is not int or "maxUnavailable" in spec):
            yield name_of(budget), "for pods of a RayCluster a budget must be a number in minAvailable"


def drain_reaches(documents: Sequence[Document]) -> Found:
    """The drain in preStop is a call of the gateway by its Service's name: with TLS it must know whom to trust, with
    tenants it must show a token. Without, it is refused within a moment, and the pod ends with its requests."""
    loaded = [config for _where, config in configs(documents)]
    front = _gateway_variables(documents)
    tls = any(config.tls.cert_file or config.tls.api_cert_file for config in loaded) or bool(front & _CERTIFICATES)
    tenants = any(config.api.tenants_file for config in loaded) or "GENLOCK_API_TENANTS_FILE" in front
    services = {get(service, "metadata", "name") for service in of_kind(documents, "Service")}
    for pod, container in _drainers(documents):
        given = {str(entry.get("name")): entry for entry in env(container)}
        host = str(get(given.get("GENLOCK_ENDPOINT"), "value", default="")).rpartition(":")[0]
        if host.split(".")[0] not in services:
            yield pod.where, "GENLOCK_ENDPOINT must name the gateway's Service: the drain in preStop calls it"
        ca = str(get(given.get("GENLOCK_CA"), "value", default=""))
        mounts = [str(mount.get("mountPath")) for mount in items(container, "volumeMounts")]
        if tls and not any(ca.startswith(f"{mount}/") for mount in mounts):
            yield pod.where, "the gateway speaks TLS: GENLOCK_CA must name its CA in a volume, else no drain is done"
        if tenants and "GENLOCK_TOKEN" not in given:
            yield pod.where, "there are tenants: the drain in preStop needs an operator's GENLOCK_TOKEN"


def _gateway_variables(documents: Sequence[Document]) -> set[str]:
    gateways = [pod for pod in pods(documents) if pod.labels.get("app.kubernetes.io/component") == "gateway"]
    return {name for pod in gateways for name, value in plain_env(pod).items() if value}


def _drainers(documents: Sequence[Document]) -> Iterator[tuple[Pod, Document]]:
    for pod in pods(documents):
        for container in pod.containers:
            command = get(container, "lifecycle", "preStop", "exec", "command", default=())
            if "genlock drain" in " ".join(map(str, command)):
                yield pod, container


def transfer_fenced(documents: Sequence[Document]) -> Found:
    """Transfer engines know no authentication and take ports of the system's choice: of a worker's ports, none but
    named ones and short ranges are open to anyone but workers."""
    workers = [pod for pod in pods(documents) if pod.is_worker]
    policies = list(of_kind(documents, "NetworkPolicy"))
    for worker in workers:
        own = [policy for policy in policies if selects(get(policy, "spec", "podSelector", default={}), worker.labels)]
        if not any("Ingress" in get(policy, "spec", "policyTypes", default=("Ingress",)) for policy in own):
            yield worker.where, "no NetworkPolicy selects these pods: anyone may reach their transfer ports"
        for policy in own:
            for rule in items(policy, "spec", "ingress"):
                if not _workers_alone(rule, documents) and not _narrow(rule):
                    yield name_of(policy), f"opens a wide range of ports of {worker.where} to others than workers"


def workers_reachable(documents: Sequence[Document]) -> Found:
    """Behind policies, gateways and the controller reach workers at the ports that the settings name."""
    policies = list(of_kind(documents, "NetworkPolicy"))
    everyone = list(pods(documents))
    callers = [p for p in everyone if p.labels.get("app.kubernetes.io/component") in ("gateway", "controller")]
    for _where, config in configs(documents):
        for worker in (pod for pod in everyone if pod.is_worker):
            own = [p for p in policies if selects(get(p, "spec", "podSelector", default={}), worker.labels)]
            if own and not config.workers.port:
                yield worker.where, "workers.port is 0: a policy cannot name a port that the system chooses"
                continue
            rules = [rule for policy in own for rule in items(policy, "spec", "ingress")]
            for caller in callers:
                if own and not any(_lets_in(rule, caller, config.workers.port) for rule in rules):
                    yield worker.where, f"no policy lets {caller.where} in at workers.port {config.workers.port}"


def _lets_in(rule: Document, caller: Pod, port: int) -> bool:
    peers, ports = list(items(rule, "from")), list(items(rule, "ports"))
    who = not peers or any(selects(peer.get("podSelector") or {}, caller.labels) for peer in peers)
    where = not ports or any(
        isinstance(entry.get("port"), int) and entry["port"] <= port <= entry.get("endPort", entry["port"])
        for entry in ports
    )
    return who and where


def _workers_alone(rule: Document, documents: Sequence[Document]) -> bool:
    """Whether all that the rule lets in are worker pods."""
    peers = list(items(rule, "from"))
    if not peers:
        return False
    others = [pod for pod in pods(documents) if not pod.is_worker]
    return all(
        set(peer) == {"podSelector"}
        and get(peer, "podSelector", default={})
        and not any(selects(peer["podSelector"], pod.labels) for pod in others)
        for peer in peers
    )


def _narrow(rule: Document) -> bool:
    ports = list(items(rule, "ports"))
    spans: list[Any] = [(port.get("port"), port.get("endPort", port.get("port"))) for port in ports]
    return bool(ports) and all(
        isinstance(first, str) or (isinstance(first, int) and isinstance(last, int) and last - first < MAX_SPAN)
        for first, last in spans
    )


def one_controller(documents: Sequence[Document]) -> Found:
    """Two controllers would decide against each other, also for the length of a rolling update."""
    found = [d for d in of_kind(documents, "Deployment") if _component(d) == "controller"]
    for document in found:
        spec = get(document, "spec", default={})
        if spec.get("replicas") != 1 or get(spec, "strategy", "type") != "Recreate":
            yield name_of(document), "must have replicas: 1 and strategy Recreate"
    if not found and any(pod.is_worker for pod in pods(documents)):
        yield "Deployment", "there is no controller"


def least_rights(documents: Sequence[Document]) -> Found:
    """Rights are to read and patch one RayCluster by name and to list pods; pods without rights have no token."""
    clusters = {get(document, "metadata", "name") for document in of_kind(documents, "RayCluster")}
    for document in of_kind(documents, "ClusterRole", "ClusterRoleBinding"):
        yield name_of(document), "rights must end at the namespace: use Role and RoleBinding"
    for document in of_kind(documents, "Role"):
        for rule in items(document, "rules"):
            good = (
                rule.get("apiGroups") == ["ray.io"]
                and rule.get("resources") == ["rayclusters"]
                and set(get(rule, "verbs", default=())) <= {"get", "patch"}
                and bool(rule.get("resourceNames"))
                and set(rule["resourceNames"]) <= clusters
            )
            looks = [rule.get(key) for key in ("apiGroups", "resources", "verbs")] == [[""], ["pods"], ["list"]]
            if not good and not looks:
                yield name_of(document), "allows more than get and patch of the named RayCluster, and list of pods"
    for pod in pods(documents):
        if _wants_token(pod):
            yield pod.where, "automountServiceAccountToken must be false: these pods call no Kubernetes API"


def _wants_token(pod: Pod) -> bool:
    needs = pod.group == "head" or pod.labels.get("app.kubernetes.io/component") == "controller"
    return not needs and pod.spec.get("automountServiceAccountToken") is not False


def _component(document: Document) -> str:
    return str(get(document, "metadata", "labels", "app.kubernetes.io/component", default=""))
