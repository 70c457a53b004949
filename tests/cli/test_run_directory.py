"""What runs leave behind: nothing, or for the next one to remove."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pageferry.cli.run_directory import run_directory

_RUN = """
from pageferry.cli.run_directory import run_directory
with run_directory() as directory:
    (directory / "router.toml").write_text("secret")
    print(directory, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


class Run:
    """Another process with a directory of its own."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", _RUN], stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.directory = Path(self.process.stdout.readline().strip())

    def end(self) -> None:
        self.process.communicate("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_what_a_killed_run_left_goes_at_the_next_start_and_what_a_living_one_has_stays(temporary: Path) -> None:
    living, killed = Run(), Run()
    try:
        killed.kill()
        assert killed.directory.exists()
        with run_directory() as own:
            assert {path.name for path in temporary.iterdir()} == {own.name, living.directory.name}
            assert (living.directory / "router.toml").read_text() == "secret"
    finally:
        living.end()
    assert list(temporary.iterdir()) == []


def test_only_directories_of_runs_are_removed(temporary: Path) -> None:
    others = temporary / "elsewhere"
    for directory in (others, temporary / "pageferry-run-bare"):
        directory.mkdir()
    (others / "lock").write_bytes(b"")
    (temporary / "pageferry-run-link").symlink_to(others)
    with run_directory():
        pass
    assert {path.name for path in temporary.iterdir()} == {"elsewhere", "pageferry-run-bare", "pageferry-run-link"}
    assert (others / "lock").exists()
