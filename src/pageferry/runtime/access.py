"""Which callers may call what, by the SPIFFE ids of the certificates that they have shown."""

from collections.abc import Iterable
from typing import Any

from pageferry.core.errors import PermissionDeniedError
from pageferry.core.security import SecurityConfig, is_allowed

_CLIENTS_SERVICES = ("pageferry.v1.InferenceService", "inference.GRPCInferenceService")
_LOOPBACK = (
    "ipv4:127.",
    "ipv6:%5B::1%5D:",
    "ipv6:%5B::ffff:127.",
    "unix:",
)  # as the library writes where calls come from
# For all who get as far as here. Whatever else is served is for peers.
_OPEN_SERVICES = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")


class Access:
    """For servers that know who signs certificates; those have been verified when a call comes."""

    def __init__(self, security: SecurityConfig) -> None:
        self._peers = security.allowed_peers
        self._clients = security.allowed_clients

    def check(self, method: str, context: Any) -> None:
        """Raises PermissionDeniedError; `method` is "package.Service/Method"."""
        service = method.partition("/")[0]
        if service in _CLIENTS_SERVICES:
            if self._clients:
                check_ids(spiffe_ids(context.auth_context()), "allowed_clients", self._clients)
        elif service not in _OPEN_SERVICES:
            certificate = context.auth_context()
            if not certificate.get("x509_pem_cert"):
                raise PermissionDeniedError(f"{service} is for callers with a certificate", reason="NO_CERTIFICATE")
            check_ids(spiffe_ids(certificate), "allowed_peers", self._peers)


def check_local(what: str, context: Any) -> None:
    """Raises PermissionDeniedError for a call from another machine."""
    if not context.peer().startswith(_LOOPBACK):
        message = f"{what} are taken from this machine only, or from callers with a certificate"
        raise PermissionDeniedError(message, reason="NOT_LOCAL")


def spiffe_ids(certificate: Any) -> list[str]:
    """Of a call's authentication context."""
    return [spiffe_id.decode(errors="replace") for spiffe_id in certificate.get("peer_spiffe_id", ())]


def check_ids(spiffe_ids: Iterable[str], setting: str, allowed: tuple[str, ...]) -> None:
    """Raises PermissionDeniedError naming the setting and what it does not hold."""
    if not is_allowed(ids := list(spiffe_ids), allowed):
        named = ", ".join(ids) or "a certificate without a SPIFFE id"
        raise PermissionDeniedError(f"{named} is not in security.{setting}", reason="NOT_ALLOWED")
