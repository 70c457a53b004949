"""Threads that share a kernel's work: callers at once, more threads than cores, and crews that stay."""

import threading
from pathlib import Path

import pytest
import torch
from compiled import kernels, needs_library

from pageferry.kernels.rms_norm import compiled_rms_norm

pytestmark = needs_library
CALLERS, CALLS = 4, 50


def norms(num_threads: int, results: list[torch.Tensor]) -> None:
    rows, loaded = torch.arange(257 * 63, dtype=torch.float32).view(257, 63), kernels(num_threads=num_threads)
    results += [compiled_rms_norm(loaded, rows + call, rows[0], 1e-5) for call in range(CALLS)]


def test_callers_at_once_with_more_threads_than_cores() -> None:
    expected: list[torch.Tensor] = []
    norms(1, expected)
    results: list[list[torch.Tensor]] = [[] for _ in range(CALLERS)]
    callers = [threading.Thread(target=norms, args=(16, result)) for result in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads")
def test_crews_stay_for_the_next_call() -> None:
    norms(7, [])
    num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    norms(7, [])
    assert sum(1 for _ in Path("/proc/self/task").iterdir()) == num_threads
