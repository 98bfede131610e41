"""The settings: one frozen dataclass a section, every field with its rules. Read by `cluster/config.py` alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cluster.roles import MAX_WORKERS
from kvstore.layout import MAX_PAGE_TOKENS, WORKING_FORMATS


def _setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    check: Callable[[Any], str] | None = None,
    empty: Any = None,
) -> Any:
    """A field with its rules. `check` returns what is wrong with a value, or an empty text; `empty` is what a blank
    text means where it means anything."""
    rules = {"doc": doc, "low": low, "high": high, "choices": choices, "secret": secret, "check": check, "empty": empty}
    return field(default=default, metadata=rules)


def _page_tokens(value: int) -> str:
    return "" if value % 4 == 0 else "must be a multiple of 4"


def _hex_secret(value: str) -> str:
    if value and not re.fullmatch(r"[0-9a-fA-F]{32,128}", value):
        return "must be 32 to 128 hexadecimal digits, or empty for a random one"
    return ""


def _not_blank(value: str) -> str:
    return "" if value.strip() else "must not be empty"


def _resources(value: str) -> str:
    one = r"([A-Za-z]|\{role\})([\w./-]|\{role\}){0,62}=\d{1,6}(\.\d{1,4})?"
    return "" if not value or re.fullmatch(f"{one}(,{one})*", value) else "must read name=amount,name=amount"


def _labels(value: str) -> str:
    one = r"[\w./-]{1,128}=([\w.-]|\{role\}){1,63}"
    return "" if not value or re.fullmatch(f"{one}(,{one})*", value) else "must read key=value,key=value"


@dataclass(frozen=True)
class ModelConfig:
    name: str = _setting("smollm2", "Model to serve: a known name.", check=_not_blank)
    path: str = _setting("", "Folder or file of the checkpoint; empty: where the named model is installed.")
    linears: str = _setting(
        "auto",
        "Precision of linear layers; auto takes the fastest that this host has.",
        choices=("auto", "fp32", "fp16"),
    )


@dataclass(frozen=True)
class CacheConfig:
    page_tokens: int = _setting(32, "Token positions of one KV page.", low=4, high=MAX_PAGE_TOKENS, check=_page_tokens)
    kv_format: str = _setting(
        "int8", "Format of KV in pages.", choices=tuple(sorted(kv_format.value for kv_format in WORKING_FORMATS))
    )
    attention: str = _setting("auto", "Attention kernels.", choices=("auto", "reference", "cpu", "triton"))
    prefill_pages: int = _setting(512, "Pages in the pool of a prefill worker.", low=2, high=1 << 22)
    decode_pages: int = _setting(1024, "Pages in the pool of a decode worker.", low=2, high=1 << 22)
    scrub: bool = _setting(True, "Overwrite pages with zeros when they are retired.")


@dataclass(frozen=True)
class TransferConfig:
    engine: str = _setting("shm", "Transfer engine.", choices=("shm", "mooncake", "nixl"))
    nixl_transport: str = _setting(
        "auto",
        "How the nixl engine moves pages; auto takes CMA on one host, RDMA where there is some, else TCP.",
        choices=("auto", "tcp"),
    )
    timeout_ms: int = _setting(10_000, "Longest time of one pull.", low=10, high=600_000)
    lease_ms: int = _setting(15_000, "How long prefill keeps promised pages without a renewal.", low=100, high=600_000)


@dataclass(frozen=True)
class WorkersConfig:
    prefill: int = _setting(1, "Prefill workers.", low=1, high=MAX_WORKERS)
    decode: int = _setting(1, "Decode workers.", low=1, high=MAX_WORKERS)
    host: str = _setting(
        "127.0.0.1", "Address that workers listen on; auto: each its host's own, for workers on many hosts.",
        check=_not_blank,
    )  # fmt: skip
    port: int = _setting(
        0, "Port of a worker: the first free one from here on, of 64; 0: any free one.", low=0, high=65_472
    )
    cpus: float = _setting(0.5, "CPUs that Ray reserves for one worker.", low=0.01, high=256.0)
    gpus: float = _setting(0.0, "GPUs that Ray reserves for one worker.", low=0.0, high=64.0)
    resources: str = _setting(
        "",
        "Further Ray resources of one worker, name=amount,name=amount; {role}: its role. Empty: none.",
        check=_resources,
    )
    labels: str = _setting(
        "",
        "Labels that a worker's Ray node must have, key=value,key=value; {role}: its role. Empty: any node.",
        check=_labels,
    )
    threads: int = _setting(1, "Compute threads of one worker.", low=1, high=256)
    chunk_tokens: int = _setting(256, "Most prompt tokens of one prefill step.", low=1, high=65_536)
    max_running: int = _setting(8, "Most requests in one step of a worker.", low=1, high=4096)
    max_waiting: int = _setting(32, "Most requests that wait for admission at a worker.", low=0, high=65_536)
    start_timeout_ms: int = _setting(180_000, "Longest start of one worker.", low=100, high=3_600_000)
    drain_timeout_ms: int = _setting(10_000, "Longest wait for running requests at a stop.", low=0, high=3_600_000)
    status_poll_ms: int = _setting(500, "Time between two looks at a worker.", low=10, high=60_000)
    status_timeout_ms: int = _setting(2_000, "Longest wait for a worker's status.", low=10, high=60_000)
    stall_ms: int = _setting(
        60_000, "A step loop that stood still for so long is not healthy.", low=100, high=3_600_000
    )


@dataclass(frozen=True)
class ApiConfig:
    host: str = _setting("127.0.0.1", "Address that the gateway listens on.", check=_not_blank)
    port: int = _setting(50051, "Port of the gateway; 0: any free one.", low=0, high=65_535)
    peer_host: str = _setting(
        "", "Address where other gateways of the registry ask this one for its requests; empty: api.host, or this "
        "host's own address where that is a wildcard.",
    )  # fmt: skip
    http_host: str = _setting("127.0.0.1", "Address of the OpenAI-compatible HTTP API.", check=_not_blank)
    http_port: int = _setting(
        8000, "Port of the HTTP API; 0: any free one; -1 or empty: off.", low=-1, high=65_535, empty=-1
    )
    max_requests: int = _setting(64, "Most requests that run at once in this gateway.", low=1, high=65_536)
    tenant_max_requests: int = _setting(
        0, "Most requests of one tenant at once; max_requests in the tenants file goes before it; 0: no limit.",
        low=0, high=65_536,
    )  # fmt: skip
    queue_ms: int = _setting(
        0, "How long a request waits for a place where all workers are full; 0: refused at once.", low=0, high=600_000
    )
    max_queued: int = _setting(64, "Most requests that wait for a place; they count as running.", low=1, high=4096)
    retry_after_ms: int = _setting(500, "Retry delay told to a refused caller.", low=1, high=600_000)
    max_connections: int = _setting(
        1024, "Most connections at once, at each of the two doors; as many more may be in their TLS greeting.", low=1,
        high=65_536,
    )  # fmt: skip
    max_prompt_bytes: int = _setting(2 << 20, "Longest prompt text, all messages together.", low=1, high=256 << 20)
    max_message_bytes: int = _setting(
        4 << 20, "Longest request message on the wire; less is taken where no prompt that fits the context needs it.",
        low=1 << 10, high=512 << 20,
    )  # fmt: skip
    default_deadline_ms: int = _setting(300_000, "Deadline of a request that names none.", low=1, high=86_400_000)
    max_deadline_ms: int = _setting(3_600_000, "Longest deadline; later ones are cut to it.", low=1, high=86_400_000)
    default_max_tokens: int = _setting(
        128, "Longest answer of a request that names no max_tokens.", low=1, high=1 << 24
    )
    tenants_file: str = _setting("", "File of tenants and digests of their tokens; empty: one tenant, no token.")


@dataclass(frozen=True)
class AuthConfig:
    """Beside `api.tenants_file`."""

    registry_keys: bool = _setting(False, "Also take the keys that `genlock keys` keeps in the registry.")
    issuer: str = _setting("", "Identity provider whose tokens (JWT) are taken; empty: none.")
    audience: str = _setting("genlock", "What its tokens must be meant for.", check=_not_blank)
    jwks: str = _setting("", "Its public keys: a file, or an https address.")
    tenant_claim: str = _setting("tenant", "Claim that names the tenant.", check=_not_blank)
    role_claim: str = _setting("genlock_role", "Claim that names the role, or a list of roles.", check=_not_blank)
    operator_role: str = _setting("operator", "The role of operators.", check=_not_blank)


@dataclass(frozen=True)
class TlsConfig:
    cert_file: str = _setting(
        "",
        "Certificate (PEM) of this process; with it everything speaks TLS. Between workers, gateways and controller "
        "both sides show one; it must carry the name genlock.internal.",
    )  # fmt: skip
    key_file: str = _setting("", "Key (PEM) of tls.cert_file.")
    ca_file: str = _setting("", "Certificates that sign those of the other parts of the cluster.")
    api_cert_file: str = _setting("", "Certificate of the front doors, where it is another one than tls.cert_file.")
    api_key_file: str = _setting("", "Key of tls.api_cert_file.")
    client_ca_file: str = _setting(
        "", "Callers of the gRPC front door must show a certificate that this signs; empty: they need none."
    )


@dataclass(frozen=True)
class MetricsConfig:
    host: str = _setting("127.0.0.1", "Address of Prometheus endpoints.", check=_not_blank)
    port: int = _setting(
        -1, "Port of the gateway's metrics, 9464 by custom; 0: any free one; -1 or empty: off.",
        low=-1, high=65_535, empty=-1,
    )  # fmt: skip
    worker_port: int = _setting(
        -1, "Port of a worker's metrics: the first free one from here on; 0: any free one; -1 or empty: off.",
        low=-1, high=65_535, empty=-1,
    )  # fmt: skip
    controller_port: int = _setting(
        -1, "Port of the metrics of `genlock controller`, 9466 by custom; 0: any free one; -1 or empty: off. In "
        "`genlock up` they are the gateway's.",
        low=-1, high=65_535, empty=-1,
    )  # fmt: skip


@dataclass(frozen=True)
class TracingConfig:
    endpoint: str = _setting("", "OTLP collector (gRPC) that traces go to, as http://host:4317; empty: no tracing.")
    sample_ratio: float = _setting(1.0, "Share of requests that are traced.", low=0.0, high=1.0)


@dataclass(frozen=True)
class LogConfig:
    format: str = _setting("text", "Form of log lines.", choices=("text", "json"))
    level: str = _setting("info", "Least level that is logged.", choices=("debug", "info", "warning", "error"))
    folder: str = _setting("", "Folder of log files, one for each process; empty: the process' stderr.")
    prompts: bool = _setting(False, "Log prompts and answers at level debug. For tracking down a fault, never to stay.")


@dataclass(frozen=True)
class ClusterConfig:
    secret: str = _setting(
        "", "Keys prefix keys and digests; hexadecimal. Empty: random at every start.", secret=True, check=_hex_secret
    )


def _registry_url(value: str) -> str:
    if value == "memory":
        return ""
    try:
        parts = urlsplit(value)
        place = parts.path if parts.scheme == "unix" else parts.hostname
        if parts.scheme not in ("redis", "rediss", "unix") or not place or parts.port == 0:
            raise ValueError
    except ValueError:
        return "must be memory, redis://host:port/db, rediss://host:port/db (TLS) or unix:///path"
    if parts.username or parts.password:
        return "must carry no credentials: use registry.username and registry.password"
    return ""


def _sentinels(value: str) -> str:
    if value and not re.fullmatch(r"[^\s,:]+:\d{1,5}(,[^\s,:]+:\d{1,5})*", value):
        return "must read host:port,host:port"
    return ""


def _namespace(value: str) -> str:
    return "" if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value) else "must be 1 to 64 of letters, digits, . _ -"


@dataclass(frozen=True)
class RegistryConfig:
    url: str = _setting(
        "memory",
        "Where the fleet is registered: memory, redis://host:port/db, rediss://... (TLS) or unix:///path. With "
        "registry.sentinels the host is the service's name.",
        check=_registry_url,
    )
    username: str = _setting("", "User at the Redis server; empty: its default user.")
    password: str = _setting("", "Password at the Redis server; empty: none.", secret=True)
    sentinels: str = _setting("", "Sentinels, host:port,host:port; empty: none.", check=_sentinels)
    sentinel_password: str = _setting("", "Password at the sentinels; empty: none.", secret=True)
    ca_file: str = _setting("", "Certificates that the Redis server's must be signed by; empty: the system's.")
    cert_file: str = _setting("", "Certificate shown to the Redis server; empty: none.")
    key_file: str = _setting("", "Key of registry.cert_file.")
    namespace: str = _setting(
        "genlock", "Begins all keys: one for each cluster that shares the Redis server.", check=_namespace
    )
    timeout_ms: int = _setting(1_000, "Longest time of one call to the registry.", low=10, high=60_000)
    ttl_ms: int = _setting(
        6_000, "A worker that has not been told for so long is gone; told every third of it.", low=100, high=600_000
    )
    poll_ms: int = _setting(1_000, "Time between two looks at the registry.", low=10, high=60_000)
    event_limit: int = _setting(10_000, "Most events kept; the oldest go first.", low=1, high=1_000_000)
    node: str = _setting("", "Name of the node in a worker's record; empty: the host's name.")
    pod: str = _setting("", "Name of the pod in a worker's record; empty: none.")


@dataclass(frozen=True)
class ControlConfig:
    restart: bool = _setting(True, "Start a worker again that died.")
    surge: int = _setting(1, "Workers of a role above the wanted count while others drain.", low=0, high=MAX_WORKERS)
    reconcile_ms: int = _setting(
        200, "Time between two looks at what is wanted and what there is.", low=10, high=60_000
    )
    drain_open_ms: int = _setting(
        1_500, "How long a draining worker takes requests that were on their way.", low=0, high=600_000
    )
    backoff_ms: int = _setting(500, "Wait before the start after a bad end; doubles with each.", low=1, high=600_000)
    backoff_cap_ms: int = _setting(60_000, "Longest such wait.", low=1, high=3_600_000)
    healthy_ms: int = _setting(60_000, "Ready for so long: earlier bad ends are forgotten.", low=1, high=86_400_000)
    kill_ms: int = _setting(
        120_000, "Not ready for so long without one good answer: the worker is killed.", low=100, high=86_400_000
    )
    stop_timeout_ms: int = _setting(15_000, "Longest wait for an asked end of a worker.", low=100, high=600_000)
    autoscale_ms: int = _setting(5_000, "Time between two decisions of the autoscaler.", low=100, high=3_600_000)
    host: str = _setting(
        "127.0.0.1", "Address that the controller listens on; auto: that of the host where it runs.", check=_not_blank
    )
    port: int = _setting(0, "Port of the controller; 0: any free one.", low=0, high=65_535)
    ray_address: str = _setting(
        "local",
        "Ray cluster: host:port of its head, auto for the one of this machine, local for one of our own.",
        check=_not_blank,
    )
    ray_namespace: str = _setting("genlock", "Ray namespace of the cluster's actors.", check=_namespace)
    place_timeout_ms: int = _setting(10_000, "Longest wait for a worker's place on Ray.", low=100, high=3_600_000)


def _kube_server(value: str) -> str:
    try:
        parts = urlsplit(value)
        plain = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
        good = (
            (parts.scheme == "https" or plain) and bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
        )
    except ValueError:
        good = False
    return "" if good else "must be https://host:port; http:// only for this host itself"


def _kube_name(value: str) -> str:
    good = re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", value)
    return "" if good else "must be a name of Kubernetes: 1 to 63 of a-z, 0-9, - and ."


@dataclass(frozen=True)
class KubeConfig:
    enabled: bool = _setting(False, "`genlock controller` owns the replicas of a RayCluster (KubeRay).")
    cluster: str = _setting("genlock", "Name of the RayCluster.", check=_kube_name)
    namespace: str = _setting(
        "", "Its namespace; empty: the service account's.", check=lambda value: _kube_name(value) if value else ""
    )
    prefill_group: str = _setting("prefill", "Worker group of prefill workers.", check=_kube_name)
    decode_group: str = _setting("decode", "Worker group of decode workers.", check=_kube_name)
    prefill_per_pod: int = _setting(1, "Prefill workers that one pod takes.", low=1, high=64)
    decode_per_pod: int = _setting(1, "Decode workers that one pod takes.", low=1, high=64)
    server: str = _setting("https://kubernetes.default.svc", "The Kubernetes API.", check=_kube_server)
    account_folder: str = _setting(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "Folder with token, ca.crt and namespace of the service account.",
        check=_not_blank,
    )
    timeout_ms: int = _setting(5_000, "Longest time of one call to the Kubernetes API.", low=10, high=60_000)
    sync_ms: int = _setting(10_000, "Time between two looks at the pods when nothing changes.", low=100, high=600_000)
    node_timeout_ms: int = _setting(
        120_000,
        "Longest wait of a worker's start for its pod; below workers.start_timeout_ms.",
        low=100,
        high=3_600_000,
    )


@dataclass(frozen=True)
class Config:
    """All settings. Sections and fields are the keys of files, variables and flags."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    log: LogConfig = field(default_factory=LogConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    kube: KubeConfig = field(default_factory=KubeConfig)
