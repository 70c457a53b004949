"""How services prove to each other who they are, and who may call whom."""

from collections.abc import Iterable
from dataclasses import dataclass

from pageferry.core.errors import invalid


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Files are read again when they change; without a cert_file nothing is encrypted."""

    cert_file: str = ""  # PEM, this service's certificate and what it is signed with
    key_file: str = ""  # PEM, its key
    ca_file: str = ""  # PEM, who signs peers' certificates; set: peers must show one
    server_name: str = ""  # a name that all services' certificates have; empty: the host that is called
    client_certs: bool = True  # router with a ca_file: whether clients must show a certificate, too
    allowed_peers: tuple[str, ...] = ()  # SPIFFE ids of services that may call, a final * for any rest; empty: all
    allowed_clients: tuple[str, ...] = ()  # router: those of clients
    tenants_file: str = ""  # router: TOML, who may call with which API key, and how much; empty: all may

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise invalid("key_file", self.key_file, "must be set where cert_file is, and only there")
        if self.ca_file and not self.cert_file:
            raise invalid("ca_file", self.ca_file, "must be empty without a cert_file")
        for name in ("allowed_peers", "allowed_clients"):
            for spiffe_id in getattr(self, name):
                if not spiffe_id.startswith("spiffe://") or "*" in spiffe_id[:-1]:
                    raise invalid(name, spiffe_id, "must be spiffe://TRUST-DOMAIN/PATH, with a * at its end at most")
            if getattr(self, name) and not self.ca_file:
                raise invalid(name, getattr(self, name), "must be empty without a ca_file")
        if self.allowed_clients and not self.client_certs:
            raise invalid("allowed_clients", self.allowed_clients, "must be empty where client_certs is off")

    @property
    def clients_show_certificates(self) -> bool:
        """On a router; other services have peers only, who always do where there is a ca_file."""
        return bool(self.ca_file) and self.client_certs


def is_allowed(spiffe_ids: Iterable[str], allowed: tuple[str, ...]) -> bool:
    """Whether one of a certificate's ids is in the list; all are in an empty one."""
    return not allowed or any(_matches(spiffe_id, entry) for spiffe_id in spiffe_ids for entry in allowed)


def _matches(spiffe_id: str, entry: str) -> bool:
    return spiffe_id.startswith(entry[:-1]) if entry.endswith("*") else spiffe_id == entry
