"""Channels to other services, with options that agree with the servers'."""

import grpc
from opentelemetry.trace import Tracer

from pageferry.runtime.traced_channel import TracedChannel

# Both ends ping a silent connection this often, and servers tolerate pings three times as often: one that tolerated
# fewer would close connections with too_many_pings.
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = KEEPALIVE_MS // 3

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    # A worker that comes back on its address is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    # Two clients in one process don't share a connection, nor its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, tracer: Tracer) -> grpc.aio.Channel:
    """A channel to host:port whose calls are traced. The caller closes it."""
    return TracedChannel(grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS), tracer)
