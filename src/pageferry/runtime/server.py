"""A gRPC server with health, reflection, tracing, and a drain that lets live streams end."""

import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Tracer

from pageferry.core.config import ServerConfig
from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.runtime.channels import KEEPALIVE_OPTIONS, MIN_PING_INTERVAL_MS
from pageferry.runtime.interceptors import ServerInterceptor
from pageferry.runtime.logs import log

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Calls that came and that no handler has taken yet. Beyond its own limit, 1000, the library drops calls as CANCELLED;
# whether there is room is for handlers to say, with a status that says so.
_MAX_PENDING = 1_000_000
_FLUSH_S = 2.0  # for the last messages and statuses to leave, at readers' pace
# A server stays until this long nobody has sent it new work: who has not heard that it drains is told so, and not cut.
_QUIET_S = 0.2
_LONGEST_QUIET_S = 2.0


class GrpcServer:
    """Add servicers, then `start`; leaving the context ends every call. Not serving until told otherwise."""

    def __init__(self, config: ServerConfig, tracer: Tracer) -> None:
        self.port = config.port
        self._config = config
        self._interceptor = ServerInterceptor(tracer)
        self._health = health.aio.HealthServicer()
        self._services = [""]
        self._draining = False
        self._server = grpc.aio.server(
            interceptors=(self._interceptor,),
            options=(
                *KEEPALIVE_OPTIONS,
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.so_reuseport", 0),
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
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            reason = _why_not(self._config.host, self._config.port)
            message = f"server.port: can't listen on {address}: {reason}"
            raise UnavailableError(message, reason="CANNOT_LISTEN") from None
        await self._server.start()
        return self.port

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

    async def _tell(self, serving: bool, refusal: Callable[[], PageferryError] | None) -> None:
        self._interceptor.refusal = refusal
        for service in self._services:
            await self._health.set(service, _SERVING if serving else _NOT_SERVING)

    async def drain(self, grace_s: float) -> int:
        """Refuse new work and let open calls end; what still lives after `grace_s` ends with UNAVAILABLE.

        Returns how many calls were ended. Calls that serve live work, such as pushes of pages, are still taken.
        """
        began = not self._draining
        self._draining = True
        if began:
            await self._tell(False, _draining)
            log("draining", grace_s=grace_s, open_calls=self.num_open)
        num_ended = await self._interceptor.wait_idle(grace_s)
        await self._interceptor.wait_quiet(_QUIET_S, _LONGEST_QUIET_S)
        log("drained", grace_s=grace_s, ended_calls=num_ended)
        return num_ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._interceptor.end_all()
        await self._server.stop(_FLUSH_S)


def _draining() -> UnavailableError:
    return UnavailableError("the server is draining", reason="DRAINING")


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
