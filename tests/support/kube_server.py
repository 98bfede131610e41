"""A Kubernetes API server for kubectl itself: it keeps what is created, in namespaces that exist, and patches it. No
controller works on what it keeps, but that a Deployment is available at once."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonpatch

# By group and version: plural name and kind of what lives in a namespace.
KINDS = {
    "v1": {
        "secrets": "Secret", "configmaps": "ConfigMap", "services": "Service", "serviceaccounts": "ServiceAccount",
        "pods": "Pod",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "ray.io/v1": {"rayclusters": "RayCluster"},
}  # fmt: skip
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
Answer = tuple[int, dict[str, Any]]


class Kept:
    """What was created: by group and version, namespace, plural name and name."""

    def __init__(self) -> None:
        self.namespaces: dict[str, dict[str, Any]] = {}
        self.objects: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self._revision = 0

    def names(self, plural: str, namespace: str) -> set[str]:
        return {key[3] for key in self.objects if key[1:3] == (namespace, plural)}

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        parts = [part for part in path.split("/") if part]
        if parts in (["api"], ["apis"], ["version"]):
            return 200, _root(parts[0])
        if parts[:1] not in (["api"], ["apis"]):
            return _status(404, "NotFound", f"{path} is not served")
        length = 2 if parts[0] == "api" else 3
        version, rest = "/".join(parts[1:length]), parts[length:]
        if version not in KINDS:
            return _status(404, "NotFound", f"{version} is not served")
        if not rest:
            return 200, _resources(version)
        if rest[0] == "namespaces" and len(rest) < 3:
            return self._namespace(method, rest[1:], body)
        if rest[0] != "namespaces" or rest[1] not in self.namespaces or rest[2] not in KINDS[version]:
            return _status(404, "NotFound", f"{path}: no such namespace or kind")
        return self._object(method, version, rest[1], rest[2], rest[3:], query, body)

    def _namespace(self, method: str, names: list[str], body: Any) -> Answer:
        if method == "POST":
            if body["metadata"]["name"] in self.namespaces:
                return _status(409, "AlreadyExists", "the namespace exists")
            self.namespaces[body["metadata"]["name"]] = body
            return 201, body
        found = self.namespaces.get(names[0]) if names else None
        return (200, found) if found is not None else _status(404, "NotFound", "no such namespace")

    def _object(
        self, method: str, version: str, namespace: str, plural: str, names: list[str], query: dict[str, list[str]],
        body: Any,
    ) -> Answer:  # fmt: skip
        if method == "POST":
            key = (version, namespace, plural, body["metadata"]["name"])
            if key in self.objects:
                return _status(409, "AlreadyExists", f"{key[3]} exists")
            if body["kind"] != KINDS[version][plural] or body["apiVersion"] != version:
                return _status(400, "BadRequest", f"{body['apiVersion']} {body['kind']} is not one of {plural}")
            return 201, self._keep(key, body)
        if not names:
            wanted = [
                one.partition("=")[2] for one in query.get("fieldSelector", []) if one.startswith("metadata.name")
            ]
            items = [
                one for key, one in self.objects.items()
                if key[:3] == (version, namespace, plural) and key[3] in (wanted or [key[3]])
            ]  # fmt: skip
            kind = KINDS[version][plural]
            return 200, {
                "kind": f"{kind}List",
                "apiVersion": version,
                "metadata": {"resourceVersion": "1"},
                "items": items,
            }
        key = (version, namespace, plural, names[0])
        if key not in self.objects:
            return _status(404, "NotFound", f"{plural} {names[0]!r} not found")
        if method == "PATCH":
            try:
                return 200, self._keep(key, jsonpatch.apply_patch(self.objects[key], body))
            except jsonpatch.JsonPatchException as error:
                return _status(422, "Invalid", f"the server rejected our request: {error}")
        return 200, self.objects[key]

    def _keep(self, key: tuple[str, str, str, str], body: dict[str, Any]) -> dict[str, Any]:
        self._revision += 1
        meta = {
            **body["metadata"],
            "namespace": key[1],
            "uid": f"u{self._revision}",
            "resourceVersion": str(self._revision),
        }
        body = self.objects[key] = {**body, "metadata": meta}
        if body["kind"] == "Deployment":
            body["status"] = {"conditions": [{"type": "Available", "status": "True"}]}
        return body


def read_body(body: bytes) -> Any:
    """JSON, or what `kubectl create` sends: Kubernetes' protobuf envelope, of which the names and a secret's data are
    read."""
    if not body.startswith(b"k8s\0"):
        return json.loads(body) if body else None
    envelope = _fields(body[4:])
    what, raw = _fields(envelope[1][0]), _fields(envelope[2][0])
    data = [_fields(entry) for entry in raw.get(2, [])]
    return {
        "apiVersion": what[1][0].decode(),
        "kind": what[2][0].decode(),
        "metadata": {"name": _fields(raw[1][0])[1][0].decode()},
        "data": {entry[1][0].decode(): b64encode(entry[2][0]).decode() for entry in data if entry.keys() == {1, 2}},
    }


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The length-delimited fields of a protobuf message, by number."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        length = varint()
        if kind == 2:
            found.setdefault(number, []).append(message[at : at + length])
            at += length
    return found


def _root(which: str) -> dict[str, Any]:
    if which == "version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if which == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = []
    for version in KINDS:
        if "/" in version:
            one = {"groupVersion": version, "version": version.split("/")[1]}
            groups.append({"name": version.split("/")[0], "versions": [one], "preferredVersion": one})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str) -> dict[str, Any]:
    listed: list[dict[str, Any]] = [
        {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": VERBS}
        for plural, kind in KINDS[version].items()
    ]
    if version == "v1":
        listed.append({
            "name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": False, "verbs": VERBS,
        })  # fmt: skip
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}


def _status(code: int, reason: str, message: str) -> Answer:
    return code, {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code,
    }  # fmt: skip


@contextmanager
def kube_server(folder: Path) -> Iterator[tuple[Path, Kept]]:
    """The file for KUBECONFIG, and what is kept."""
    kept = Kept()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            code, answer = kept.answer(self.command, url.path, parse_qs(url.query), read_body(body))
            # Nothing happens here that a watch could tell.
            said = b"" if "watch" in url.query else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def log_message(self, *_args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, name="kube api", daemon=True)
    thread.start()
    named = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
        "users": [{"name": "here", "user": {}}],
    }  # fmt: skip
    config = folder / "kubeconfig"
    config.write_text(json.dumps(named))
    try:
        yield config, kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
