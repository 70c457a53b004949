"""HTTP over TLS: certificates as for gRPC, and their SPIFFE ids."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from pageferry.core.errors import PermissionDeniedError
from pageferry.core.security import SecurityConfig
from pageferry.router.gateway.envelope import RequestIds
from pageferry.router.gateway.errors import error_body, error_status
from pageferry.router.gateway.protocol import HttpProtocol
from pageferry.runtime.access import check_ids
from pageferry.runtime.tls import Certificates


@dataclass(frozen=True, slots=True)
class HttpTls:
    """What the gateway shows, and whose certificates it takes."""

    context: ssl.SSLContext
    allowed_clients: tuple[str, ...]

    @classmethod
    def of(cls, security: SecurityConfig, certificates: Certificates | None) -> "HttpTls | None":
        """None without certificates."""
        if certificates is None:
            return None
        context = certificates.for_http(require_clients=security.clients_show_certificates)
        return cls(context, security.allowed_clients)

    def protocol(self) -> type[HttpProtocol]:
        """The gateway's, which answers all requests of a connection with 403 whose certificate isn't allowed."""
        allowed = self.allowed_clients

        class Protocol(HttpProtocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                try:
                    check_ids(_spiffe_ids(transport), "allowed_clients", allowed)
                except PermissionDeniedError as error:
                    self.app = RequestIds(_Refusal(error))

        return Protocol


class _Refusal:
    """An application."""

    def __init__(self, error: PermissionDeniedError) -> None:
        self._answer = JSONResponse(error_body(error), error_status(error), {"connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def _spiffe_ids(transport: asyncio.Transport) -> list[str]:
    certificate: dict[str, Any] = transport.get_extra_info("peercert") or {}
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    # As gRPC has it: a certificate that names several has none.
    return names if len(names) == 1 and names[0].startswith("spiffe://") else []
