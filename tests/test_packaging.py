"""The linked folders are part of what is installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "tests", "docs")
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
    subprocess.run(command, cwd=tree, check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "pageferry"
    folders = [package, *(path for path in package.iterdir() if path.is_dir())]
    modules = {f"pageferry/{file.relative_to(package)}" for folder in folders for file in folder.glob("*.py")}
    assert len(modules) > 50
    assert modules <= packed
    assert {"pageferry/py.typed", "pageferry/v1/types_pb2.pyi"} <= packed
