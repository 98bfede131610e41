"""Channel and server options that all of Genlock's gRPC ends share."""

from __future__ import annotations

import grpc.aio

MAX_MESSAGE_BYTES = 16 << 20
PING_MS = 10_000
HANDSHAKE_MS = 20_000
PING_TIMEOUT_MS = 5_000


def channel_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, *, ping_ms: int = PING_MS, ping_timeout_ms: int = PING_TIMEOUT_MS
) -> list[tuple[str, int]]:
    """Options of a channel between parts of a cluster. A peer that is silent for `ping_ms` is pinged while calls are
    open; without an answer they end as Unavailable `ping_timeout_ms` later."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Workers are reached directly: a proxy for the outside world must not see tokens.
        ("grpc.enable_http_proxy", 0),
        # A worker that comes back is seen within a second, not after minutes of back-off.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name also the longest wait for a connection: a busy or far peer needs more than a moment.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A peer that is stopped, or whose machine vanished, sends no reset; without a ping its streams would hang.
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        # The limit that counts for pings; by itself it is a minute, whatever the one above says.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, *, ping_ms: int = PING_MS, ping_timeout_ms: int = PING_TIMEOUT_MS
) -> list[tuple[str, int]]:
    """Options of a server. A port that another process listens on is an error, not a shared port."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        # A caller that vanished: its requests end.
        ("grpc.keepalive_time_ms", 3 * ping_ms),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        # Allows the pings of `channel_options`.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def door_options(max_message_bytes: int, max_connections: int, max_streams: int) -> list[tuple[str, int]]:
    """Options of a server that anybody can reach. `max_streams`: calls at once over one connection."""
    return [
        *server_options(max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_streams),
        # A connection that does not greet.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ]


def open_channel(endpoint: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to another part of the cluster; connects at the first call."""
    return grpc.aio.insecure_channel(endpoint, options=channel_options(max_message_bytes))
