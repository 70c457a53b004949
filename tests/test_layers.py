"""A planted violation of a layer must fail the lint."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": "src"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with their links."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("src", "router", "prefill_svc", "decode_svc", "kernels", "proto"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def test_the_sources_pass(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("core", "torch"),
        ("core", "logging"),
        ("core", "time"),
        ("kernels", "pageferry.engine"),
        ("engine", "pageferry.runtime"),
        ("runtime", "pageferry.engine"),
        ("client", "pageferry.router"),
        ("router", "pageferry.loadgen"),
        ("router", "torch"),
        ("decode_svc", "pageferry.prefill_svc"),
        ("ext_proc", "pageferry.core"),
        ("oip", "pageferry.core"),
        ("v1", "pageferry.core"),
    ],
)
def test_a_planted_violation_fails(tree: Path, module: str, planted: str) -> None:
    file = tree / "src" / "pageferry" / module / "planted.py"
    file.write_text(f"import {planted}\n")
    try:
        result = lint(tree)
    finally:
        file.unlink()
    assert result.returncode != 0
    assert f"pageferry.{module}.planted -> {planted}" in result.stdout
