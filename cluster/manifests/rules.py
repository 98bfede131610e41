"""What must hold for Genlock's manifests beyond their schemas: each rule is a function of all documents. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cluster.manifests import rules_access, rules_pods, rules_settings
from cluster.manifests.view import Document

# What a rule yields: where, and what is wrong with the way to put it right.
Rule = Callable[[Sequence[Document]], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Finding:
    rule: str
    where: str
    message: str


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "settings-load": rules_settings.settings_load,
        "engine-reaches": rules_settings.engine_reaches,
        "listens-outside": rules_settings.listens_outside,
        "grace-above-drain": rules_settings.grace_above_drain,
        "workers-reachable": rules_access.workers_reachable,
        "roles-apart": rules_settings.roles_apart,
        "workers-fit": rules_settings.workers_fit,
        "groups-alike": rules_pods.groups_alike,
        "both-roles": rules_pods.both_roles,
        "replica-bounds": rules_pods.replica_bounds,
        "replicas-are-ours": rules_pods.replicas_are_ours,
        "ray-auth": rules_pods.ray_auth,
        "controller-joins-ray": rules_pods.controller_joins_ray,
        "head-is-empty": rules_pods.head_is_empty,
        "drain-before-stop": rules_pods.drain_before_stop,
        "drain-reaches": rules_access.drain_reaches,
        "probes-hit-ports": rules_pods.probes_hit_ports,
        "shared-memory": rules_pods.shared_memory,
        "whole-devices": rules_pods.whole_devices,
        "not-root": rules_pods.not_root,
        "images-named": rules_pods.images_named,
        "names-exist": rules_pods.names_exist,
        "secrets-by-reference": rules_access.secrets_by_reference,
        "services-hit-ports": rules_access.services_hit_ports,
        "budgets-count": rules_access.budgets_count,
        "transfer-fenced": rules_access.transfer_fenced,
        "one-controller": rules_access.one_controller,
        "least-rights": rules_access.least_rights,
    }
)


def check(documents: Sequence[Document]) -> tuple[Finding, ...]:
    """All findings, by rule. None: every rule holds."""
    return tuple(Finding(name, where, message) for name, rule in RULES.items() for where, message in rule(documents))
