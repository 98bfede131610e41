"""From a RayCluster, its pods and what is needed to one JSON patch. Pure.

Replicas rise to what the wanted workers need. They fall only together with the names of pods that hold no worker, in
the same patch: KubeRay would choose others. Where it is not certain which pods hold workers, nothing falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cluster.control.hands import Need
from cluster.roles import Role
from kvstore.errors import NoCapacity, NotFound, Refused, Unavailable

# KubeRay's own default.
NO_HIGH = 2_147_483_647
GROUP_LABEL = "ray.io/group"
MAX_POD_NAME = 253


@dataclass(frozen=True)
class Group:
    """One worker group as it was read. `replicas` None: not there. `strategy`: its scaleStrategy; None: not there."""

    index: int
    name: str
    replicas: int | None
    low: int = 0
    high: int = NO_HIGH
    strategy: Mapping[str, Any] | None = None

    @property
    def count(self) -> int:
        return self.replicas or 0

    @property
    def named(self) -> tuple[str, ...]:
        """Pods that were named for deletion earlier."""
        names = (self.strategy or {}).get("workersToDelete") or ()
        return tuple(str(name) for name in names)


@dataclass(frozen=True)
class Pod:
    """One pod of the RayCluster. `ends`: it is being deleted, or its containers have ended."""

    name: str
    group: str
    ends: bool = False
    running: bool = True


@dataclass(frozen=True)
class Fit:
    """How pods relate to workers: the group of each role, and how many workers one of its pods takes."""

    groups: Mapping[Role, str]
    per_pod: Mapping[Role, int]

    def pods_for(self, role: Role, workers: int) -> int:
        return -(-workers // self.per_pod[role])


@dataclass(frozen=True)
class Plan:
    """`patch`: RFC 6902, empty where nothing changes. `done`: what it does, one sentence a group. `short`: what the
    bounds do not allow; the patch goes as far as they do."""

    patch: tuple[Mapping[str, Any], ...] = ()
    done: tuple[str, ...] = ()
    short: NoCapacity | None = None
    replicas: Mapping[Role, int] = field(default_factory=lambda: MappingProxyType({}))


def read_groups(cluster: Mapping[str, Any], fit: Fit) -> dict[Role, Group]:
    """The group of each role. Raises NotFound (`no_worker_group`), Refused (`two_scalers`, `multi_host_group`),
    Unavailable (`kube_unreadable`)."""
    spec = _mapping(cluster.get("spec"), "spec")
    if spec.get("enableInTreeAutoscaling"):
        raise Refused(
            "two_scalers",
            "spec.enableInTreeAutoscaling of the RayCluster is true: Ray's autoscaler would end pods that nobody "
            "drained; set it to false, or kube.enabled to false",
        )
    listed = spec.get("workerGroupSpecs") or ()
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise _unreadable("spec.workerGroupSpecs", "a list")
    groups = [_group(index, item) for index, item in enumerate(listed)]
    found: dict[Role, Group] = {}
    for role, name in fit.groups.items():
        own = [group for group in groups if group.name == name]
        if not own:
            known = ", ".join(group.name for group in groups) or "none"
            raise NotFound(
                "no_worker_group",
                f"the RayCluster has no worker group {name!r} (it has: {known}): set kube.{role.value}_group",
                field=f"kube.{role.value}_group",
            )
        if listed[own[0].index].get("numOfHosts", 1) != 1:
            raise Refused("multi_host_group", f"numOfHosts of worker group {name} must be 1: one pod is one replica")
        found[role] = own[0]
    return found


def read_pods(items: Iterable[Mapping[str, Any]]) -> tuple[Pod, ...]:
    """Pods of worker groups. Raises Unavailable (`kube_unreadable`)."""
    pods = []
    for item in items:
        meta = _mapping(item.get("metadata"), "metadata of a pod")
        name, group = meta.get("name"), _mapping(meta.get("labels") or {}, "labels of a pod").get(GROUP_LABEL)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_POD_NAME:
            raise _unreadable("metadata.name of a pod", "a name")
        if not isinstance(group, str):
            continue
        phase = _mapping(item.get("status") or {}, "status of a pod").get("phase")
        ends = bool(meta.get("deletionTimestamp")) or phase in ("Succeeded", "Failed")
        pods.append(Pod(name, group, ends, running=phase == "Running"))
    return tuple(pods)


def check_bounds(groups: Mapping[Role, Group], counts: Mapping[Role, int], fit: Fit) -> None:
    """Raises NoCapacity (`above_max_replicas`) naming demand and supply."""
    for role, workers in counts.items():
        if fit.pods_for(role, workers) > groups[role].high:
            raise _short(role, workers, groups[role], fit)


def plan(groups: Mapping[Role, Group], pods: Sequence[Pod], needs: Mapping[Role, Need], fit: Fit) -> Plan:
    """One patch for all groups. After it was carried out, the same needs give an empty one."""
    known = frozenset(pod.name for pod in pods)
    workers = [names for need in needs.values() for names in need.places]
    busy = frozenset().union(*workers) if workers else frozenset()
    # A worker in none of these pods: nobody knows which pod is empty.
    sure = all(names & known for names in workers)
    patch: list[Mapping[str, Any]] = []
    done: list[str] = []
    replicas: dict[Role, int] = {}
    short: NoCapacity | None = None
    for role in sorted(needs, key=lambda role: role.value):
        group, need = groups[role], needs[role]
        demand = fit.pods_for(role, need.wanted)
        if demand > group.high:
            short = short or _short(role, need.wanted, group, fit)
        target = min(max(demand, group.low), group.high)
        going: list[str] = []
        if target < group.count:
            going = _empty(group, pods, busy)[: group.count - target] if sure and not need.placing else []
            target = group.count - len(going)
        replicas[role] = target
        if target == group.count or not group.low <= target <= group.high:
            continue
        patch += _operations(group, target, _named(group, known, busy, going))
        names = f": {', '.join(going)} " + ("goes" if len(going) == 1 else "go") if going else ""
        done.append(f"{group.name} replicas {group.count} to {target}{names}")
    return Plan(tuple(patch), tuple(done), short, MappingProxyType(replicas))


def _empty(group: Group, pods: Sequence[Pod], busy: frozenset[str]) -> list[str]:
    """Pods that count as replicas and hold no worker; those that do not run first."""
    own = [pod for pod in pods if pod.group == group.name and not pod.ends and pod.name not in group.named]
    if len(own) > group.count:
        return []  # KubeRay has still to end some: which ones is not ours to say any more
    return [pod.name for pod in sorted(own, key=lambda pod: (pod.running, pod.name)) if pod.name not in busy]


def _named(group: Group, known: frozenset[str], busy: frozenset[str], going: Sequence[str]) -> list[str]:
    """Earlier names stay while their pods are there: KubeRay may not have come to them yet."""
    earlier = [name for name in group.named if name in known and name not in busy]
    return list(dict.fromkeys([*earlier, *going]))


def _operations(group: Group, target: int, named: Sequence[str]) -> list[Mapping[str, Any]]:
    path = f"/spec/workerGroupSpecs/{group.index}"
    out: list[Mapping[str, Any]] = [{"op": "test", "path": f"{path}/groupName", "value": group.name}]
    if group.replicas is None:
        out.append({"op": "add", "path": f"{path}/replicas", "value": target})
    else:
        out.append({"op": "test", "path": f"{path}/replicas", "value": group.replicas})
        out.append({"op": "replace", "path": f"{path}/replicas", "value": target})
    if tuple(named) != group.named:
        if group.strategy is not None:
            out.append({"op": "test", "path": f"{path}/scaleStrategy", "value": dict(group.strategy)})
        value = {**(group.strategy or {}), "workersToDelete": list(named)}
        out.append({"op": "add", "path": f"{path}/scaleStrategy", "value": value})
    return out


def _group(index: int, item: object) -> Group:
    where = f"spec.workerGroupSpecs[{index}]"
    group = _mapping(item, where)
    name, strategy = group.get("groupName"), group.get("scaleStrategy")
    if not isinstance(name, str):
        raise _unreadable(f"{where}.groupName", "a name")
    if strategy is not None:
        named = _mapping(strategy, f"{where}.scaleStrategy").get("workersToDelete")
        if named is not None and not isinstance(named, list):
            raise _unreadable(f"{where}.scaleStrategy.workersToDelete", "a list")
    low = _count(group, "minReplicas", where, 0)
    high = _count(group, "maxReplicas", where, NO_HIGH)
    return Group(
        index, name, _count(group, "replicas", where, None), low or 0, NO_HIGH if high is None else high, strategy
    )


def _count(group: Mapping[str, Any], key: str, where: str, default: int | None) -> int | None:
    value = group.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _unreadable(f"{where}.{key}", "a whole number")
    return value


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unreadable(where, "an object")
    return value


def _unreadable(where: str, what: str) -> Unavailable:
    return Unavailable("kube_unreadable", f"{where} as the Kubernetes API tells it is not {what}")


def _short(role: Role, workers: int, group: Group, fit: Fit) -> NoCapacity:
    return NoCapacity(
        "above_max_replicas",
        f"{workers} {role.value} workers need {fit.pods_for(role, workers)} pods of worker group {group.name} "
        f"({fit.per_pod[role]} in a pod), its maxReplicas are {group.high}: raise maxReplicas or want fewer workers",
        field=role.value,
    )
