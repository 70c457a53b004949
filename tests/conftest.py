"""What all tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is first imported: the machine's cores are shared
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LONG_LEASES, Cluster, running
from field_table import FieldTable
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from tiny_model import write_tiny_model

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "fuzz",  # of tests/fuzz/run.py
    deadline=None,
    print_blob=True,
    max_examples=int(os.environ.get("PAGEFERRY_FUZZ_EXAMPLES", "100")),
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / "build" / "fuzz" / "examples"),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Every prompt is handed over, and chunks end at the same tokens on prefill and decode workers.
SPLIT = {
    "router.local_prefill_tokens": "0",
    "router.local_advantage": "1e9",
    "scheduler.chunk_tokens": "64",
    "scheduler.local_chunk_tokens": "64",
    "engine.num_pages": "1024",
    **LONG_LEASES,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden scenarios anew instead of comparing them")
    parser.addoption("--cases", action="store_true", help="run the tests of faults, and print which show which")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cases"):
        config.pluginmanager.register(FieldTable())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the small random Llama; not to be written to."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


# Clusters of real processes, each started once and shared by the tests that leave it as they found it.


@pytest.fixture(scope="session")
def split(tiny_model: Path) -> Iterator[Cluster]:
    """One prefill and two decode workers with the tiny model."""
    with running("--prefill", "1", "--decode", "2", "--model", str(tiny_model), settings=SPLIT) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def colocated(tiny_model: Path) -> Iterator[Cluster]:
    """One decode worker that computes prompts itself."""
    with running("--prefill", "0", "--decode", "1", "--model", str(tiny_model), settings=SPLIT) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def real() -> Iterator[Cluster]:
    """One prefill and two decode workers with the packaged model."""
    with running("--prefill", "1", "--decode", "2", "--model", "smollm2") as cluster:
        yield cluster
