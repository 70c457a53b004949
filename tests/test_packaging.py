"""What is installed: the linked folders, and the CPU kernels where there is a compiler; and that benchmarks start."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build_wheel(tmp_path: Path, **environment: str) -> set[str]:
    """What a wheel of a copy of the sources holds."""
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "tests", "docs")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skipped)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=tree, check=True, timeout=600, env=os.environ | environment)
    (wheel,) = tmp_path.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("script", ["gpu", "handoff", "kernels_cpu", "kernels_report", "overhead", "quality"])
def test_benchmarks_start_as_the_makefile_starts_them(script: str) -> None:
    if script in ("gpu", "kernels_report"):
        pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "bench" / f"{script}.py"), "--help"]
    assert b"usage" in subprocess.run(command, env=environment, check=True, capture_output=True, timeout=250).stdout


@pytest.mark.slow
@pytest.mark.timeout(700)  # it compiles the kernels
def test_a_wheel_holds_every_module_and_the_kernels(tmp_path: Path) -> None:
    packed = build_wheel(tmp_path)
    package = ROOT / "src" / "pageferry"
    folders = [package, *(path for path in package.iterdir() if path.is_dir())]
    modules = {f"pageferry/{file.relative_to(package)}" for folder in folders for file in folder.glob("*.py")}
    assert len(modules) > 50
    assert modules <= packed
    assert {"pageferry/py.typed", "pageferry/v1/types_pb2.pyi", "pageferry/loadgen/page.html"} <= packed
    assert {"pageferry/kernels/_cpu.so", "pageferry/kernels/cpu/abi.h"} <= packed


@pytest.mark.slow
@pytest.mark.timeout(700)  # it compiles the kernels
def test_a_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    packed = build_wheel(tmp_path, CC="/no/compiler", CXX="/no/compiler")
    assert "pageferry/kernels/cpu_library.py" in packed
    assert "pageferry/kernels/_cpu.so" not in packed
