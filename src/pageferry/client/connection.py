"""What a client shows of itself, and whom it trusts."""

from pageferry.core.errors import invalid
from pageferry.runtime.tls import Certificates, TlsFiles


def certificates(ca: str, cert: str, key: str, server_name: str) -> Certificates | None:
    """None where nothing is to be encrypted. Raises InvalidArgumentError for files that can't be used."""
    if bool(cert) != bool(key):
        raise invalid("key", key, "must be given where cert is, and only there")
    if not ca:
        for name, value in (("cert", cert), ("server_name", server_name)):
            if value:
                raise invalid(name, value, "must not be given without ca")
        return None
    return Certificates(TlsFiles(cert, key, ca, server_name))
