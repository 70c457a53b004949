"""A gRPC server with health, reflection, tracing, and a drain that lets live streams end."""

import errno
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Tracer

from pageferry.core.config import ServerConfig
from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.core.security import SecurityConfig
from pageferry.runtime.access import Access
from pageferry.runtime.channels import KEEPALIVE_OPTIONS, MIN_PING_INTERVAL_MS
from pageferry.runtime.interceptors import ServerInterceptor
from pageferry.runtime.logs import log
from pageferry.runtime.tls import Certificates

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Calls that came and that no handler has taken yet. Beyond its own limits, 1000 calls and 30 s, the library drops calls
# as CANCELLED; whether there is room is for handlers to say, with a status that says so.
_MAX_PENDING = 1_000_000
_MAX_UNREQUESTED_S = 3600
_FLUSH_S = 2.0  # for the last messages and statuses to leave, at readers' pace
# A server stays until this long nobody has sent it new work: who has not heard that it drains is told so, and not cut.
_QUIET_S = 0.2
_LONGEST_QUIET_S = 2.0
# Of a call, over what is usual by far. Between the library's own two limits it refuses at random.
_MAX_METADATA_BYTES = 16 * 2**10
HANDSHAKE_TIMEOUT_MS = 10_000  # for a new connection to say what it is
_MAX_HEALTH_BYTES = 4096
# A name of the health service, for probes that restart what does not serve it: loading, draining or waiting for other
# services is no reason to.
LIVENESS = "liveness"


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """What a server shows, and whom it lets in."""

    credentials: grpc.ServerCredentials
    access: Access | None  # None: all who get a connection

    @classmethod
    def of(
        cls, security: SecurityConfig, certificates: Certificates | None, *, for_clients: bool = False
    ) -> "ServerSecurity | None":
        """None without certificates. `for_clients`: clients are served here, beside peers."""
        if certificates is None:
            return None
        require = security.clients_show_certificates if for_clients else bool(security.ca_file)
        access = Access(security) if security.ca_file else None
        return cls(certificates.for_server(require_clients=require), access)


class GrpcServer:
    """Add servicers, then `start`; leaving the context ends every call. Not serving until told otherwise."""

    def __init__(self, config: ServerConfig, tracer: Tracer, security: ServerSecurity | None = None) -> None:
        self.port = config.port
        self._config = config
        self._security = security
        self._interceptor = ServerInterceptor(tracer, security.access if security is not None else None)
        self._health = health.aio.HealthServicer()
        self._services = [""]
        self._draining = False
        self._health_server: grpc.aio.Server | None = None
        self._server = grpc.aio.server(
            interceptors=(self._interceptor,),
            options=(
                *KEEPALIVE_OPTIONS,
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                *_bounds(),
                *_age(config.connection_age_s),
                ("grpc.server_max_unrequested_time_in_server", _MAX_UNREQUESTED_S),
                ("grpc.server.max_pending_requests", _MAX_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
            ),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service: str) -> None:
        """E.g. `add(add_page_service, receiver, "pageferry.v1.PageService")`; before `start`."""
        register(servicer, self._server)
        self._services.append(service)

    async def start(self) -> int:
        """Listen; returns the port. UnavailableError naming host and port where that can't be done."""
        reflected = [service for service in self._services if service]
        reflection.enable_server_reflection([*reflected, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        await self.set_serving(False)
        await self.set_alive(True)
        self.port = self._listen(self._server, "server.port", self._config.port, self._security)
        await self._serve_health_alone()
        await self._server.start()
        return self.port

    async def _serve_health_alone(self) -> None:
        if not self._config.health_port:
            return
        options = (*_bounds(), ("grpc.max_receive_message_length", _MAX_HEALTH_BYTES))
        server = self._health_server = grpc.aio.server(options=options)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._listen(server, "server.health_port", self._config.health_port, None)
        await server.start()

    def _listen(self, server: grpc.aio.Server, setting: str, port: int, security: ServerSecurity | None) -> int:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{port}"
        try:
            if security is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, security.credentials)
        except RuntimeError:
            message = f"{setting}: can't listen on {address}: {_why_not(self._config.host, port)}"
            raise UnavailableError(message, reason="CANNOT_LISTEN") from None

    @property
    def num_open(self) -> int:
        """Calls that brought work, and transfers of pages, that are not over."""
        return self._interceptor.num_open

    async def set_serving(self, serving: bool, *, refusal: Callable[[], PageferryError] | None = None) -> None:
        """What health checks answer, for the process ("") and for each service; watchers of it are told.

        `refusal` makes the error that new work gets from now on. Once the server drains, nothing changes any more.
        """
        if not self._draining:
            await self._tell(serving, refusal)

    async def set_alive(self, alive: bool) -> None:
        """What health checks of LIVENESS answer: whether a restart would not help."""
        await self._health.set(LIVENESS, _SERVING if alive else _NOT_SERVING)

    async def _tell(self, serving: bool, refusal: Callable[[], PageferryError] | None) -> None:
        self._interceptor.refusal = refusal
        for service in self._services:
            await self._health.set(service, _SERVING if serving else _NOT_SERVING)

    async def begin_drain(self, grace_s: float, open_calls: int) -> None:
        """Refuse new work, and say so once. Calls that serve live work, such as pushes of pages, are still taken."""
        if self._draining:
            return
        self._draining = True
        await self._tell(False, _draining)
        log("draining", grace_s=grace_s, open_calls=open_calls)

    async def drain(self, grace_s: float) -> int:
        """Begin it, and let open calls end; what still lives after `grace_s` ends with UNAVAILABLE.

        Returns how many calls were ended.
        """
        await self.begin_drain(grace_s, self.num_open)
        num_ended = await self._interceptor.wait_idle(grace_s)
        await self._interceptor.wait_quiet(_QUIET_S, _LONGEST_QUIET_S)
        log("drained", grace_s=grace_s, ended_calls=num_ended)
        return num_ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._interceptor.end_all()
        await self._server.stop(_FLUSH_S)
        if self._health_server is not None:
            await self._health_server.stop(None)


def _bounds() -> tuple[tuple[str, int], ...]:
    """What holds for every server."""
    return (
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.so_reuseport", 0),
    )


def _age(seconds: float) -> tuple[tuple[str, int], ...]:
    """A connection of that age takes no new calls; those on it go on."""
    return (("grpc.max_connection_age_ms", math.ceil(seconds * 1000)),) if seconds else ()


def _draining() -> UnavailableError:
    return UnavailableError("the server is draining", reason="DRAINING", nothing_begun=True)


def _why_not(host: str, port: int) -> str:
    """Why one can't listen there, since the gRPC library doesn't tell."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except socket.gaierror as error:
        return f"host not found ({error.strerror})"
    except OSError as error:
        return "the port is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0).lower()
    return "the port was in use"
