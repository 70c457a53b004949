"""Kernels run compiled on a GPU, or interpreted: Triton decides when a kernel's file is imported, for the process.

So these tests need a process of their own without a GPU: `make test` starts one with TRITON_INTERPRET=1.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
_HERE = Path(__file__).parent

if find_spec("triton") is None:  # files of kernels can't be imported; test_triton.py says so
    collect_ignore = [path.name for path in _HERE.glob("test_*.py") if path.name != "test_triton.py"]


@pytest.hookimpl(tryfirst=True)  # before items are chosen by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not (INTERPRETED or HAS_GPU):
            item.add_marker(pytest.mark.skip(reason="no GPU here; TRITON_INTERPRET=1 runs it in the interpreter"))
        # numpy, in which the interpreter computes, warns of what these tests provoke.
        item.add_marker(pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
