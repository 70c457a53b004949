"""Certificates and keys in files, read again when these change, as the credentials of servers and channels."""

import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from pageferry.core.errors import InvalidArgumentError, PageferryError, invalid
from pageferry.core.security import SecurityConfig
from pageferry.runtime.file_stamp import Stamp, stamp_of
from pageferry.runtime.logs import log
from pageferry.runtime.targets import Target


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    cert: str = ""  # what this process shows, and what that is signed with; empty: nothing
    key: str = ""
    ca: str = ""  # who signs what others show; empty: whom this machine trusts
    server_name: str = ""  # a name that servers' certificates have; empty: the host that is called

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.cert, self.key, self.ca) if path]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What the files hold at one time."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class Certificates:
    """What the files hold; any thread may ask. Files that can't be used are logged, and what was before stays."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises InvalidArgumentError naming the file."""
        self.files = files
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._loaded = _load(files)

    @classmethod
    def of(cls, security: SecurityConfig) -> "Certificates | None":
        """A service's own; None where nothing is encrypted."""
        if not security.cert_file:
            return None
        return cls(TlsFiles(security.cert_file, security.key_file, security.ca_file, security.server_name))

    @property
    def now(self) -> Loaded:
        """The same object until a file changes."""
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    self._loaded = _load(self.files)
                    log("certificates_read", files=self.files.paths)
                except PageferryError as error:
                    log("certificates_kept", level="error", reason=error.reason, message=error.message)
            return self._loaded

    def for_server(self, *, require_clients: bool) -> grpc.ServerCredentials:
        """Credentials of a server, which shows each new connection what the files hold then."""
        shown = self.now

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            loaded = self.now
            if loaded is shown:
                return None
            shown = loaded
            return _server_configuration(loaded)

        # The stubs leave out that None says "as before".
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
        return grpc.dynamic_ssl_server_credentials(_server_configuration(shown), fetch, require_clients)

    def for_http(self, *, require_clients: bool) -> ssl.SSLContext:
        """A context for servers of HTTP, which shows each new connection what the files hold then."""
        context = _server_context(self.files)
        context.verify_mode = ssl.CERT_REQUIRED if require_clients else ssl.CERT_NONE
        self.follow(context)
        return context

    def for_http_client(self) -> ssl.SSLContext:
        """A context for a client of HTTP, with what the files hold now."""
        context = ssl.create_default_context(cafile=self.files.ca or None)
        if self.files.cert:
            context.load_cert_chain(self.files.cert, self.files.key)
        return context

    def follow(self, context: ssl.SSLContext) -> None:
        """Let each new connection of a server's context have what the files hold then."""
        shown, current = self.now, context
        if context.verify_mode is ssl.CERT_REQUIRED:
            # Who resumes a session shows no certificate, and would be let in by whom the files trusted when it began.
            # The library can't be kept from resuming one of TLS 1.2.
            context.minimum_version, context.num_tickets = ssl.TLSVersion.TLSv1_3, 0

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            nonlocal shown, current
            loaded = self.now
            if loaded is not shown:
                with suppress(PageferryError):  # they are just being changed again
                    renewed = _server_context(self.files)
                    renewed.verify_mode = context.verify_mode
                    shown, current = loaded, renewed
            connection.context = current

        context.sni_callback = choose

    def _look(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in self.files.paths]


def channel_options(files: TlsFiles, name: str = "") -> tuple[tuple[str, str]] | tuple[()]:
    """`name` is that of the server, where the files say none."""
    expected = files.server_name or name
    return (("grpc.ssl_target_name_override", expected),) if expected else ()


def check_name(target: Target, files: TlsFiles) -> None:
    """InvalidArgumentError where no certificate could have the target's name."""
    if not target.has_name and not files.server_name:
        limit = "must be set where several addresses are called: a name that all their certificates have"
        raise invalid("server_name", files.server_name, limit)


def channel_credentials(loaded: Loaded) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)


def _server_configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    assert loaded.key is not None and loaded.cert is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)


def _load(files: TlsFiles) -> Loaded:
    """Raises InvalidArgumentError where a file can't be read, or key and certificate don't belong together."""
    cert, key, ca = (_read(path) if path else None for path in (files.cert, files.key, files.ca))
    _server_context(files)
    return Loaded(cert, key, ca)


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.ca:
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ValueError) as error:
            raise _unusable(f"the file of authorities {files.ca}", error) from None
    if files.cert:
        try:  # an encrypted key would be asked for at the terminal
            context.load_cert_chain(files.cert, files.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise _unusable(f"the certificate {files.cert} with the key {files.key}", error) from None
    return context


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(what: str, error: Exception) -> InvalidArgumentError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InvalidArgumentError(f"{what} can't be used: {why}", reason="BAD_CERTIFICATE")
