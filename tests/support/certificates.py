"""Authorities and certificates of a test's own, made by openssl."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import programs

_DAYS = "2"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
SERVER_NAME = "pageferry.test"


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    cert: Path
    key: Path

    def replace_by(self, other: "Identity") -> None:
        """As a rotation does: each file at once, the key first."""
        for own, new in ((self.key, other.key), (self.cert, other.cert)):
            copy = own.with_suffix(".new")
            copy.write_bytes(new.read_bytes())
            os.replace(copy, own)


class Authority:
    """Signs certificates; its files lie in the directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.cert = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        _openssl("req", "-x509", *_KEY, "-subj", f"/CN={name}", "-days", _DAYS, "-keyout", self._key, "-out", self.cert)

    def issue(
        self, name: str, *, spiffe_id: str = "", address: str = "127.0.0.1", server_name: str = SERVER_NAME
    ) -> Identity:
        """For the name, the address and, where one is given, a SPIFFE id."""
        return self.issue_for(
            name, [f"DNS:{server_name}", f"IP:{address}", *([f"URI:{spiffe_id}"] if spiffe_id else [])]
        )

    def issue_for(self, name: str, names: Sequence[str]) -> Identity:
        """For just these, each with its kind before it, as OpenSSL has it."""
        made = Identity(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(names)}\n", encoding="ascii")
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        signed_by = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signed_by, "-days", _DAYS, "-extfile", extensions, "-out", made.cert)
        return made

    def secret(self, directory: Path, identity: Identity) -> Path:
        """The directory, with what a secret of cert-manager's holds."""
        directory.mkdir()
        for name, source in {"tls.crt": identity.cert, "tls.key": identity.key, "ca.crt": self.cert}.items():
            (directory / name).write_bytes(source.read_bytes())
        return directory


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run([programs.find("openssl"), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
