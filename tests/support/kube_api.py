"""A Kubernetes API server of one RayCluster and its pods, and KubeRay's part on it, over HTTP on this host.

Patches are RFC 6902 and all or nothing: a `test` that does not hold is answered with 422, as the real server does.
`settle` is what KubeRay does with a RayCluster: named pods go, missing ones come, and what is too many goes by its
own choice, which here is always a pod that holds a worker where there is one.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonpatch
from aiohttp import web

CLUSTER = "/apis/ray.io/v1/namespaces/llm/rayclusters/genlock"
PODS = "/api/v1/namespaces/llm/pods"
TOKEN = "token-of-the-account"


def group(name: str, replicas: int, low: int = 1, high: int = 8, **more: Any) -> dict[str, Any]:
    return {"groupName": name, "replicas": replicas, "minReplicas": low, "maxReplicas": high, "numOfHosts": 1, **more}


class KubeApi:
    """`async with` serves it. `before`: called before each request, may raise a web.HTTPException or wait."""

    def __init__(self, *groups: dict[str, Any], account: Path, tls: ssl.SSLContext | None = None) -> None:
        self.cluster: dict[str, Any] = {
            "metadata": {"name": "genlock", "generation": 1},
            "spec": {"enableInTreeAutoscaling": False, "workerGroupSpecs": list(groups)},
        }
        self.pods: dict[str, str] = {}
        self.busy: Callable[[], set[str]] = set
        self.before: Callable[[web.Request], Any] | None = None
        self.patches: list[list[dict[str, Any]]] = []
        # Pods that KubeRay chose by itself.
        self.chosen: list[str] = []
        self.account = account
        self.tls = tls
        self.token = TOKEN
        self.url = ""
        self._names = itertools.count()
        self._runner: web.AppRunner | None = None
        account.mkdir(exist_ok=True)
        (account / "token").write_text(TOKEN + "\n")
        (account / "namespace").write_text("llm")
        self.settle()

    async def __aenter__(self) -> KubeApi:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([web.get(CLUSTER, self._get), web.patch(CLUSTER, self._patch), web.get(PODS, self._list)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def group(self, name: str) -> dict[str, Any]:
        return next(one for one in self.cluster["spec"]["workerGroupSpecs"] if one["groupName"] == name)

    def replicas(self, name: str) -> int:
        return self.group(name)["replicas"]

    def of(self, name: str) -> list[str]:
        return [pod for pod, group in self.pods.items() if group == name]

    def settle(self) -> None:
        for one in self.cluster["spec"]["workerGroupSpecs"]:
            name = one["groupName"]
            for pod in (one.get("scaleStrategy") or {}).get("workersToDelete") or ():
                self.pods.pop(pod, None)
            while len(self.of(name)) < one["replicas"]:
                self.pods[f"genlock-{name}-worker-{next(self._names)}"] = name
            while len(own := self.of(name)) > one["replicas"]:
                victim = next((pod for pod in own if pod in self.busy()), own[0])
                self.chosen.append(victim)
                del self.pods[victim]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.before is not None:
            refused = self.before(request)
            if asyncio.iscoroutine(refused):
                refused = await refused
            if refused is not None:
                return _status(*refused)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _status(404, f"{request.path} not found")

    async def _get(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(self.cluster)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "ray.io/cluster=genlock"
        items = [
            {"metadata": {"name": pod, "labels": {"ray.io/group": name}}, "status": {"phase": "Running"}}
            for pod, name in self.pods.items()
        ]
        items.append({"metadata": {"name": "genlock-head", "labels": {}}, "status": {"phase": "Running"}})
        return web.json_response({"metadata": {}, "items": items})

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        assert request.content_type == "application/json-patch+json"
        operations = await request.json()
        try:
            changed = jsonpatch.apply_patch(copy.deepcopy(self.cluster), operations)
        except jsonpatch.JsonPatchException as error:
            return _status(422, f"the server rejected our request due to an error in our request: {error}")
        changed["metadata"]["generation"] += 1
        self.cluster = changed
        self.patches.append(operations)
        self.settle()
        return web.json_response(self.cluster)


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code)
