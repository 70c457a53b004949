"""Clusters of real processes, each started once and shared by the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running

# Every prompt is handed over, and chunks end at the same tokens on prefill and decode workers.
SPLIT = {
    "router.local_prefill_tokens": "0",
    "scheduler.chunk_tokens": "64",
    "scheduler.local_chunk_tokens": "64",
    "engine.num_pages": "1024",
}


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
    with running("--prefill", "1", "--decode", "2", "--model", "smollm2", ready_s=180) as cluster:
        yield cluster
