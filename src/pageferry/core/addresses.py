"""Where services are reached: host and port, or a name that stands for several hosts."""

import re
from dataclasses import dataclass

from pageferry.core.errors import invalid
from pageferry.core.ports import MAX_PORT, is_port

_DNS = "dns:"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_NAME = 254  # with a dot at its end


@dataclass(frozen=True, slots=True)
class ServiceName:
    """All that listen on one port of the addresses behind a name."""

    host: str
    port: int


def bracketed(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int) -> str:
    """As channels take it."""
    return f"{bracketed(host)}:{port}"


def parse_worker(field: str, text: str) -> ServiceName | None:
    """The name in `dns:///name:port` or `dns:name:port`; None for an address. Raises InvalidArgumentError."""
    is_name = text.startswith(_DNS)
    host, _, port = text.removeprefix(_DNS).removeprefix("///").rpartition(":") if is_name else text.rpartition(":")
    if not host or not is_port(port):
        raise invalid(field, text, f"must be host:port or dns:///name:port with a port from 1 to {MAX_PORT}")
    if not is_name:
        return None
    if not _NAME.fullmatch(host) or len(host) > _MAX_NAME:
        raise invalid(field, text, "must be dns:///name:port, whose name this machine's resolver is asked for")
    return ServiceName(host, int(port))
