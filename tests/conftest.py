"""What all tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is first imported: the machine's cores are shared

from pathlib import Path

import pytest
from hypothesis import settings
from tiny_model import write_tiny_model

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden scenarios anew instead of comparing them")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the small random Llama; not to be written to."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
