"""Rules about the settings that manifests carry. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cluster.config import ENV_PREFIX, load
from cluster.manifests.view import Document, env, get, name_of, of_kind, plain_env, pods
from cluster.settings import Config
from kvstore.errors import InvalidInput

SETTINGS_KEY = "genlock.yaml"
# Between the end of a drain and the end of the grace: processes and engines are closed.
STOP_MARGIN_MS = 15_000
_LOOPBACK = ("127.", "localhost", "::1", "[::1]")
# Stands for a secret while settings are loaded: hexadecimal, as the strictest of them must be.
_STAND_IN = "0" * 64

Found = Iterator[tuple[str, str]]


def settings_load(documents: Sequence[Document]) -> Found:
    """The settings file loads, and so do the variables of every container on top of it."""
    texts = list(_files(documents))
    if not texts:
        yield "ConfigMap", f"no ConfigMap has the key {SETTINGS_KEY}"
    for where, text in texts:
        try:
            load(file_text=text, file_name=SETTINGS_KEY)
        except InvalidInput as error:
            yield where, error.message
            return
    for pod in pods(documents):
        variables = {
            str(entry.get("name")): str(entry.get("value", _STAND_IN))
            for container in pod.containers
            for entry in env(container)
            if str(entry.get("name")).startswith(ENV_PREFIX)
        }
        try:
            load(environ=variables)
        except InvalidInput as error:
            yield pod.where, error.message


def engine_reaches(documents: Sequence[Document]) -> Found:
    for where, config in configs(documents):
        if config.transfer.engine == "shm" and any(pod.is_worker for pod in pods(documents)):
            yield where, "transfer.engine is shm, which reaches no other pod: take nixl or mooncake"


def listens_outside(documents: Sequence[Document]) -> Found:
    for where, config in configs(documents):
        hosts = {"api.host": config.api.host, "api.http_host": config.api.http_host}
        metrics = config.metrics
        if max(metrics.port, metrics.worker_port, metrics.controller_port) >= 0:
            hosts["metrics.host"] = metrics.host
        for key, host in hosts.items():
            if host.startswith(_LOOPBACK):
                yield where, f"{key} is {host}, which no other pod and no probe reaches: take 0.0.0.0"
        # These tell others the address at which they listen, so each needs its own.
        for key, host in (("workers.host", config.workers.host), ("control.host", config.control.host)):
            if host != "auto":
                yield where, f"{key} is {host}: take auto, each pod has its own address"


def grace_above_drain(documents: Sequence[Document]) -> Found:
    """Kubernetes kills a pod at the end of its grace, whatever still runs."""
    for _where, config in configs(documents):
        for pod in pods(documents):
            if not pod.is_worker and pod.labels.get("app.kubernetes.io/component") != "gateway":
                continue
            drain_ms = int(plain_env(pod).get("GENLOCK_WORKERS_DRAIN_TIMEOUT_MS", str(config.workers.drain_timeout_ms)))
            grace = pod.spec.get("terminationGracePeriodSeconds", 30)
            if not isinstance(grace, int) or grace * 1000 < drain_ms + STOP_MARGIN_MS:
                yield (
                    pod.where,
                    f"terminationGracePeriodSeconds is {grace}: it must be at least workers.drain_timeout_ms "
                    f"({drain_ms} ms) and {STOP_MARGIN_MS // 1000} s for the end",
                )


def roles_apart(documents: Sequence[Document]) -> Found:
    """Workers ask Ray for what the group of their role offers, else they land wherever there is room."""
    for where, config in configs(documents):
        asked = config.workers.resources.split(",") + config.workers.labels.split(",")
        if any(pod.is_worker for pod in pods(documents)) and not any("{role}" in pair for pair in asked):
            yield where, "workers.resources must hold {role}=1: a worker would be placed in pods of the other role"


def workers_fit(documents: Sequence[Document]) -> Found:
    """A pod has the CPUs and GPUs of as many workers as it offers Ray places for."""
    for where, config in configs(documents):
        for pod in pods(documents):
            if not pod.is_worker:
                continue
            limits = [get(container, "resources", "limits", default={}) for container in pod.containers]
            for key, each, setting in (
                ("cpu", config.workers.cpus, "workers.cpus"),
                ("nvidia.com/gpu", config.workers.gpus, "workers.gpus"),
            ):
                # KubeRay tells Ray whole CPUs, rounded up.
                has = sum(math.ceil(_amount(limit.get(key, 0))) for limit in limits)
                needs = each * pod.places
                if needs > has:
                    yield pod.where, f"has {has} {key}, {pod.places} workers need {needs:g} ({setting} of {where})"


def _amount(quantity: object) -> float:
    """A quantity of CPUs or devices as Kubernetes writes it; 0 for what is none."""
    text = str(quantity)
    scale = 1000 if text.endswith("m") else 1
    try:
        return float(text.removesuffix("m")) / scale
    except ValueError:
        return 0.0


def _files(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    for document in of_kind(documents, "ConfigMap"):
        text = get(document, "data", SETTINGS_KEY)
        if isinstance(text, str):
            yield name_of(document), text


def configs(documents: Sequence[Document]) -> Iterator[tuple[str, Config]]:
    """Settings that load; what does not is the finding of `settings_load`."""
    for where, text in _files(documents):
        try:
            yield where, load(file_text=text, file_name=SETTINGS_KEY).config
        except InvalidInput:
            continue
