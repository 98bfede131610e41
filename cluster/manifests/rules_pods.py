"""Rules about worker groups, containers and what they mount. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.manifests.view import Document, Pod, get, items, name_of, of_kind, plain_env, pods, ray_resources
from cluster.roles import Role

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# Settings that make pages: the two roles must have the same.
_LAYOUT_ENV = ("GENLOCK_MODEL_", "GENLOCK_CACHE_", "GENLOCK_TRANSFER_", "GENLOCK_CLUSTER_")
# Kubernetes wants whole numbers of these, as many requested as limited.
_WHOLE = ("nvidia.com/", "rdma/", "hugepages-")

Found = Iterator[tuple[str, str]]


def _clusters(documents: Sequence[Document]) -> Iterator[Document]:
    return of_kind(documents, "RayCluster")


def _groups(documents: Sequence[Document]) -> Iterator[tuple[str, Document]]:
    for cluster in _clusters(documents):
        for group in items(cluster, "spec", "workerGroupSpecs"):
            yield f"{name_of(cluster)} {group.get('groupName', '?')}", group


def groups_alike(documents: Sequence[Document]) -> Found:
    """Both roles run one image with one settings file and the same settings of model, pages and transfer."""
    workers = [pod for pod in pods(documents) if pod.is_worker]
    for pod in workers[1:]:
        for what, ours, first in zip(
            ("image", "settings file", "settings in variables"), _shape(pod), _shape(workers[0]), strict=True
        ):
            if ours != first:
                yield pod.where, f"{what} differs from {workers[0].where}: {ours!r} and {first!r}; pages would not fit"


def _shape(pod: Pod) -> tuple[object, object, object]:
    images = sorted(str(container.get("image")) for container in pod.containers)
    maps = sorted(
        str(get(volume, "configMap", "name")) for volume in items(pod.spec, "volumes") if "configMap" in volume
    )
    own = {key: value for key, value in plain_env(pod).items() if key.startswith(_LAYOUT_ENV)}
    return images, maps, own


def both_roles(documents: Sequence[Document]) -> Found:
    """Each role has a group, and its pods offer Ray the resource of that name."""
    for cluster in _clusters(documents):
        groups = {str(group.get("groupName")): group for group in items(cluster, "spec", "workerGroupSpecs")}
        for role in Role:
            if role.value not in groups:
                yield name_of(cluster), f"there is no worker group {role.value}"
                continue
            offered = ray_resources(groups[role.value])
            if not isinstance(offered.get(role.value), int) or offered[role.value] < 1:
                yield (
                    f"{name_of(cluster)} {role.value}",
                    f'rayStartParams.resources must offer {role.value}, as in \'"{{\\"{role.value}\\": 1}}"\'',
                )


def replica_bounds(documents: Sequence[Document]) -> Found:
    """The schema allows a maximum below the minimum; KubeRay refuses it later."""
    for where, group in _groups(documents):
        least, now, most = group.get("minReplicas", 0), group.get("replicas", 0), group.get("maxReplicas", 0)
        if not least <= now <= most:
            yield where, f"minReplicas {least} <= replicas {now} <= maxReplicas {most} does not hold"


def replicas_are_ours(documents: Sequence[Document]) -> Found:
    for cluster in _clusters(documents):
        if get(cluster, "spec", "enableInTreeAutoscaling", default=False) is not False:
            yield name_of(cluster), "enableInTreeAutoscaling must be false: Ray would end pods that nobody drained"


def ray_auth(documents: Sequence[Document]) -> Found:
    for cluster in _clusters(documents):
        if get(cluster, "spec", "authOptions", "mode") != "token":
            yield name_of(cluster), "authOptions.mode must be token: who reaches Ray's ports may run any code"


def controller_joins_ray(documents: Sequence[Document]) -> Found:
    """The controller's pod brings a node of Ray. A driver finds its node among the processes that it sees, and KubeRay
    makes certificates for its own pods alone."""
    for pod in pods(documents):
        words = [str(w) for c in pod.containers for key in ("command", "args") for w in get(c, key, default=())]
        starts_ray = pod.kind != "RayCluster" and "ray start" in " ".join(words)
        if starts_ray and pod.spec.get("shareProcessNamespace") is not True:
            yield pod.where, "shareProcessNamespace must be true: a driver finds no node of another container's"
    for cluster in _clusters(documents):
        if get(cluster, "spec", "tlsOptions", "enabled", default=False) is not False:
            yield (
                name_of(cluster),
                "tlsOptions.enabled must be false: KubeRay gives the controller's pod no certificate",
            )


def head_is_empty(documents: Sequence[Document]) -> Found:
    for cluster in _clusters(documents):
        if get(cluster, "spec", "headGroupSpec", "rayStartParams", "num-cpus") != "0":
            yield f"{name_of(cluster)} head", 'rayStartParams.num-cpus must be "0": workers would be placed on the head'


def drain_before_stop(documents: Sequence[Document]) -> Found:
    """Worker pods drain in preStop. Kubernetes expands no $(NAME) there, so a shell must."""
    for pod in pods(documents):
        if not pod.is_worker:
            continue
        commands = [
            get(container, "lifecycle", "preStop", "exec", "command", default=()) for container in pod.containers
        ]
        text = " ".join(str(word) for command in commands for word in command)
        if "genlock drain" not in text or "--wait" not in text:
            yield pod.where, "preStop must run `genlock drain ... --wait`: running requests would be cut off"
        elif "$(" in text:
            yield pod.where, "preStop holds $(...), which Kubernetes does not expand there: use a shell and $NAME"


def probes_hit_ports(documents: Sequence[Document]) -> Found:
    """A probe names a port that its container declares; the gateway has both kinds of probes."""
    for pod in pods(documents):
        for container in pod.containers:
            where = f"{pod.where} {container.get('name')}"
            ports = list(items(container, "ports"))
            known = {port.get("name") for port in ports} | {port.get("containerPort") for port in ports}
            for probe in PROBES:
                for way in ("grpc", "httpGet", "tcpSocket"):
                    port = get(container, probe, way, "port")
                    if port is not None and port not in known:
                        yield where, f"{probe} asks port {port}, which the container does not declare"
            if container.get("name") == "gateway":
                for probe in PROBES[1:]:
                    if probe not in container:
                        yield where, f"has no {probe}"


def shared_memory(documents: Sequence[Document]) -> Found:
    """Ray and transfer engines use /dev/shm; a container's own has 64 MiB."""
    for pod in pods(documents):
        if pod.kind != "RayCluster":
            continue
        media = {str(volume.get("name")): get(volume, "emptyDir", "medium") for volume in items(pod.spec, "volumes")}
        for container in pod.containers:
            mounts = {str(m.get("mountPath")): str(m.get("name")) for m in items(container, "volumeMounts")}
            if media.get(mounts.get("/dev/shm", "")) != "Memory":
                yield pod.where, "/dev/shm must be an emptyDir of medium Memory"


def whole_devices(documents: Sequence[Document]) -> Found:
    """Devices and huge pages: requests equal limits; huge pages are mounted where they are asked for."""
    for pod in pods(documents):
        huge = any(
            get(volume, "emptyDir", "medium", default="") == "HugePages-2Mi" for volume in items(pod.spec, "volumes")
        )
        for container in pod.containers:
            where = f"{pod.where} {container.get('name')}"
            asked = get(container, "resources", "requests", default={})
            most = get(container, "resources", "limits", default={})
            for key in sorted(set(asked) | set(most)):
                if key.startswith(_WHOLE) and str(asked.get(key)) != str(most.get(key)):
                    yield where, f"{key}: requests {asked.get(key)} and limits {most.get(key)} must be equal"
            if "hugepages-2Mi" in most and not huge:
                yield where, "asks for hugepages-2Mi and mounts no emptyDir of medium HugePages-2Mi"


def not_root(documents: Sequence[Document]) -> Found:
    for pod in pods(documents):
        if get(pod.spec, "securityContext", "runAsNonRoot") is not True:
            yield pod.where, "securityContext.runAsNonRoot must be true"
        for container in pod.containers:
            context = get(container, "securityContext", default={})
            where = f"{pod.where} {container.get('name')}"
            if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
                yield where, "securityContext must refuse privilege: allowPrivilegeEscalation: false"
            if "ALL" not in get(context, "capabilities", "drop", default=()):
                yield where, "securityContext.capabilities.drop must be [ALL]"


def images_named(documents: Sequence[Document]) -> Found:
    for pod in pods(documents):
        for container in pod.containers:
            image = str(container.get("image", ""))
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in image and tag in ("", "latest"):
                yield f"{pod.where} {container.get('name')}", f"image {image!r} must have a version: a tag or a digest"


def names_exist(documents: Sequence[Document]) -> Found:
    """ConfigMaps and service accounts that pods name are among the documents; Secrets are made by others."""
    have = {(document.get("kind"), get(document, "metadata", "name")) for document in documents}
    for pod in pods(documents):
        account = pod.spec.get("serviceAccountName")
        if account is not None and ("ServiceAccount", account) not in have:
            yield pod.where, f"serviceAccountName {account} is not among the manifests"
        volumes = {volume.get("name") for volume in items(pod.spec, "volumes")}
        volumes |= {get(claim, "metadata", "name") for claim in _claims(documents, pod)}
        for volume in items(pod.spec, "volumes"):
            name = get(volume, "configMap", "name")
            if name is not None and ("ConfigMap", name) not in have:
                yield pod.where, f"ConfigMap {name} is not among the manifests"
        for container in pod.containers:
            for mount in items(container, "volumeMounts"):
                if mount.get("name") not in volumes:
                    yield pod.where, f"mounts {mount.get('name')}, which is no volume of the pod"


def _claims(documents: Sequence[Document], pod: Pod) -> Iterator[Document]:
    for document in of_kind(documents, "StatefulSet"):
        if name_of(document) == pod.where:
            yield from items(document, "spec", "volumeClaimTemplates")
