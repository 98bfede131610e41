"""Pods as the controller's room: read the RayCluster and its pods, plan, patch; anew where somebody was faster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from cluster.control.hands import Need
from cluster.kube.client import KubeClient
from cluster.kube.plan import Fit, check_bounds, plan, read_groups, read_pods
from cluster.roles import Role
from cluster.settings import KubeConfig
from kvstore.errors import Conflict

MAX_TRIES = 3


def fit_of(settings: KubeConfig) -> Fit:
    return Fit(
        MappingProxyType({Role.PREFILL: settings.prefill_group, Role.DECODE: settings.decode_group}),
        MappingProxyType({Role.PREFILL: settings.prefill_per_pod, Role.DECODE: settings.decode_per_pod}),
    )


class KubeRoom:
    """The worker groups of one RayCluster. Keeps nothing between calls but a connection."""

    def __init__(self, settings: KubeConfig, client: KubeClient | None = None) -> None:
        self._fit = fit_of(settings)
        self._client = client or KubeClient(settings)

    async def check(self, counts: Mapping[Role, int]) -> None:
        check_bounds(read_groups(await self._client.cluster(), self._fit), counts, self._fit)

    async def fit(self, look: Callable[[], Awaitable[Mapping[Role, Need]]]) -> Sequence[str]:
        """One patch at most. Raises NoCapacity (`above_max_replicas`) where a patch has gone as far as it may, Conflict
        (`kube_conflict`) where each of MAX_TRIES patches met another state than it was made for."""
        for tries_left in reversed(range(MAX_TRIES)):
            groups = read_groups(await self._client.cluster(), self._fit)
            pods = read_pods(await self._client.pods())
            planned = plan(groups, pods, await look(), self._fit)
            if planned.patch:
                try:
                    await self._client.patch_cluster(planned.patch)
                except Conflict:
                    if not tries_left:
                        raise
                    continue
                return planned.done
            if planned.short is not None:
                raise planned.short
            return ()
        raise AssertionError("unreachable: the last try returns or raises")

    async def close(self) -> None:
        await self._client.close()
