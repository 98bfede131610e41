"""The few calls to the Kubernetes API that the controller makes, as a pod's service account: read one RayCluster, list
its pods, patch it. Each call has one deadline, and each failure is a typed error; nothing is tried again here.

The token is read anew for each call, since the kubelet replaces it; the certificates as well where their file changed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.roles import MAX_FLEET
from cluster.settings import KubeConfig
from kvstore.errors import (
    Conflict,
    DeadlineExceeded,
    GenlockError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from kvstore.files import FileReader
from kvstore.json_text import parse_json
from wire.watched import WatchedFiles

MAX_ANSWER_BYTES = 32 << 20
# The whole fleet in pods of its own, while those that end are still listed.
MAX_PODS = 2 * MAX_FLEET
MAX_DETAIL = 300
PATCH_TYPE = "application/json-patch+json"
ACCOUNT_FILE = FileReader(
    "no_service_account", "kube.account_folder", limit=64 << 10,
    advice="run in a pod with a service account, or set kube.account_folder",
)  # fmt: skip


class KubeClient:
    """Raises Unavailable (`kube_library_missing`) and InvalidInput (`no_service_account`) where it cannot work."""

    def __init__(self, settings: KubeConfig) -> None:
        try:
            self._http: Any = importlib.import_module("aiohttp")
        except ImportError as error:
            raise Unavailable(
                "kube_library_missing", "kube.enabled needs aiohttp: pip install 'genlock[kube]'"
            ) from error
        self._settings = settings
        self._folder = Path(settings.account_folder)
        self._namespace = settings.namespace or self._account("namespace")
        self._session: Any = None
        self._authorities = WatchedFiles(str(self._folder / "ca.crt"))
        self._tls: ssl.SSLContext | None = None

    async def cluster(self) -> Mapping[str, Any]:
        """The RayCluster object."""
        return await self._call("GET", self._cluster_path())

    async def pods(self) -> Sequence[Mapping[str, Any]]:
        """All pods of the RayCluster. Raises Unavailable (`kube_unreadable`) where they are not all in one answer."""
        query = {"labelSelector": f"ray.io/cluster={self._settings.cluster}", "limit": str(MAX_PODS)}
        answer = await self._call("GET", f"/api/v1/namespaces/{self._namespace}/pods", query=query)
        items = answer.get("items")
        whole = not (answer.get("metadata") or {}).get("continue")
        if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items) or not whole:
            raise Unavailable("kube_unreadable", f"the list of pods is no list, or has more than {MAX_PODS}")
        return items

    async def patch_cluster(self, operations: Sequence[Mapping[str, Any]]) -> None:
        """All or nothing. Raises Conflict where a `test` does not hold or the object changed meanwhile."""
        await self._call("PATCH", self._cluster_path(), body=list(operations))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _cluster_path(self) -> str:
        return f"/apis/ray.io/v1/namespaces/{self._namespace}/rayclusters/{self._settings.cluster}"

    async def _call(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: object = None
    ) -> Mapping[str, Any]:
        what = f"{method} {path}"
        timeout_ms = self._settings.timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                status, raw = await self._exchange(method, path, query, body)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "kube_timeout", f"{what}: the Kubernetes API does not answer within {timeout_ms} ms (kube.timeout_ms)"
            ) from error
        except (self._http.ClientError, OSError, ValueError) as error:
            raise Unavailable(
                "kube_unreachable", f"{what}: the Kubernetes API at {self._settings.server} cannot be reached: "
                f"{str(error)[:MAX_DETAIL] or type(error).__name__}",
            ) from error  # fmt: skip
        answer = _parsed(raw)
        if not 200 <= status < 300:
            raise refusal(what, status, answer)
        if answer is None:
            raise Unavailable("kube_unreadable", f"{what}: the answer is no JSON object")
        return answer

    async def _exchange(
        self, method: str, path: str, query: Mapping[str, str] | None, body: object
    ) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._account('token')}", "Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = PATCH_TYPE
            data = json.dumps(body).encode()
        if self._session is None:
            self._session = self._http.ClientSession(trust_env=False, cookie_jar=self._http.DummyCookieJar())
        tls: Any = self._context() if self._settings.server.startswith("https:") else True
        async with self._session.request(
            method, self._settings.server.rstrip("/") + path, params=query, data=data, headers=headers, ssl=tls,
            allow_redirects=False,
        ) as response:  # fmt: skip
            raw = bytearray()
            async for piece in response.content.iter_chunked(1 << 16):
                raw += piece
                if len(raw) > MAX_ANSWER_BYTES:
                    raise Unavailable("kube_unreadable", f"{method} {path}: an answer above {MAX_ANSWER_BYTES} bytes")
            return response.status, bytes(raw)

    def _account(self, name: str) -> str:
        path = self._folder / name
        text = ACCOUNT_FILE.text(path).strip()
        if not text:
            raise _no_account(path, "it is empty")
        return text

    def _context(self) -> ssl.SSLContext:
        if self._authorities.changed() or self._tls is None:
            # Those of before are not trusted any longer where the new ones cannot be read.
            self._tls = None
            try:
                self._tls = ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
            except OSError as error:  # ssl.SSLError too
                raise _no_account(self._folder / "ca.crt", str(error)) from error
        return self._tls


def refusal(what: str, status: int, answer: Mapping[str, Any] | None) -> GenlockError:
    """The typed error of an answer that is not a good one."""
    detail = str((answer or {}).get("message") or f"status {status}")[:MAX_DETAIL]
    text = f"{what}: {detail}"
    if status in (401, 403):
        return PermissionDenied("kube_denied", f"{text}; give the controller's service account the chart's Role")
    if status == 404:
        return NotFound("kube_not_found", f"{text}; check kube.cluster and kube.namespace", field="kube.cluster")
    if status in (409, 422):
        return Conflict("kube_conflict", text)
    if status == 504:
        return DeadlineExceeded("kube_timeout", text)
    if status == 429 or status >= 500:
        return Unavailable("kube_unreachable", text)
    return Unavailable("kube_refused", text)


def _parsed(raw: bytes) -> Mapping[str, Any] | None:
    try:
        answer = parse_json(raw)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _no_account(path: Path, why: str) -> InvalidInput:
    return InvalidInput(
        ACCOUNT_FILE.reason,
        f"{path} cannot be used: {why[:MAX_DETAIL]}; {ACCOUNT_FILE.advice}",
        field=ACCOUNT_FILE.field,
    )
