"""Names that the processes of a test, and nobody else, look up in a file of the test's own."""

import os
import subprocess
from functools import cache
from pathlib import Path

import programs

_IN_PLACE = 'mount --bind "$0" /etc/hosts && exec "$@"'


class HostsFile:
    """Stands where /etc/hosts is for commands that `prefix` begins; a change holds from their next lookup on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._behind: dict[str, set[str]] = {}
        self.prefix = ("unshare", "--mount", "sh", "-c", _IN_PLACE, str(path))
        self._write()

    def add(self, name: str, address: str) -> None:
        self._behind.setdefault(name, set()).add(address)
        self._write()

    def remove(self, name: str, address: str) -> None:
        self._behind[name].remove(address)
        self._write()

    def _write(self) -> None:
        lines = [f"{address} {name}" for name, addresses in self._behind.items() for address in sorted(addresses)]
        # At once, and the same file: whoever has it mounted sees that one, and reads it at any time.
        content = "\n".join(["127.0.0.1 localhost", *lines, ""]).encode().ljust(4096, b"\n")
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0) as file:
            file.write(content)


@cache
def skip_without_mounts() -> None:
    """Skip the test where this user may not mount anything."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        programs.lack(f"mounts can't be made here: {done.stderr.strip()}")
