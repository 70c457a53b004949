"""What a channel is opened to: one address, or several that serve the same and share the calls."""

import ipaddress
import json
from dataclasses import dataclass

from pageferry.core.addresses import host_port
from pageferry.core.errors import invalid
from pageferry.core.ports import is_port

_SERVICE = "pageferry.v1.InferenceService"
# Kept until a call has its first message, so that it can be made again: a long prompt must fit.
_RETRY_BUFFER_BYTES = 16 * 2**20
# A call goes to the next address whose health service says SERVING. One that ends as UNAVAILABLE before its first
# message, as on a router that drains or has died, is made again on another.
_SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": _SERVICE},
        "methodConfig": [
            {
                "name": [{"service": _SERVICE}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
)
_SEVERAL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
    # Names may hold a service config of their own, which would take the place of this one.
    ("grpc.service_config_disable_resolution", 1),
    # A name is looked up again when a connection ends, but not sooner after the last time than this; else 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
)
_LIMIT = "must be host:port, several of them with IP addresses for hosts as a:1,b:2, or dns:///name:port"


@dataclass(frozen=True, slots=True)
class Target:
    """As the gRPC library names it, and the channel's options that come with it."""

    uri: str
    has_name: bool = True  # one that servers' certificates may hold
    options: tuple[tuple[str, int | str], ...] = ()


def parse_target(text: str) -> Target:
    """`host:port`; `host:port,host:port`; or `dns:///name:port` for all addresses that the name stands for.

    Several addresses get calls in turn, those alone that are SERVING. Raises InvalidArgumentError.
    """
    if text.startswith("dns:"):
        return Target(text, options=_SEVERAL_OPTIONS)
    addresses = [address.strip() for address in text.split(",")]
    if len(addresses) == 1:
        return Target(text)
    hosts = [_split(address, text) for address in addresses]
    versions = {host.version for host, _ in hosts}
    if len(versions) > 1:
        raise invalid("address", text, "must not mix IPv4 and IPv6 addresses")
    joined = ",".join(host_port(str(host), port) for host, port in hosts)
    return Target(f"ipv{versions.pop()}:{joined}", has_name=False, options=_SEVERAL_OPTIONS)


def _split(address: str, text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, _, port = address.rpartition(":")
    try:
        known = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise invalid("address", text, _LIMIT) from None
    if not is_port(port):
        raise invalid("address", text, _LIMIT)
    return known, int(port)
