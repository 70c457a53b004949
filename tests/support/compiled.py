"""Compiled kernels for tests: every instruction set the machine has, and sequences on pages of their own."""

from collections.abc import Sequence as Sequences_

import page_pools
import pytest
import torch

from pageferry.kernels.append_pages import RotaryTables
from pageferry.kernels.cpu_library import CpuKernels, Isa, available_isas, load_kernels
from pageferry.kernels.sequences import PageTables, Sequences

ISAS = available_isas()
FORMATS = (*page_pools.FORMATS, *page_pools.TAIL_FORMATS)
needs_library = pytest.mark.skipif(not ISAS, reason="the library was not built: no compiler at installation")
each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())


def kernels(isa: Isa = Isa.PORTABLE, num_threads: int = 1) -> CpuKernels:
    loaded = load_kernels(num_threads, isa)
    assert loaded is not None
    return loaded


def int32(values: Sequences_[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sequences(shapes: list[tuple[int, int]], tables: list[list[int]], tails: list[int] | None = None) -> Sequences:
    """Of (start, rows in the batch) each, on the pages of `tables`, and on the first tails unless others are given."""
    row_starts, table_starts = [0], [0]
    for (_, count), table in zip(shapes, tables, strict=True):
        row_starts.append(row_starts[-1] + count)
        table_starts.append(table_starts[-1] + len(table))
    positions = [position for start, count in shapes for position in range(start, start + count)]
    flat = [page for table in tables for page in table]
    of_group = PageTables(int32(table_starts), int32(flat))
    return Sequences(int32(positions), int32(row_starts), (of_group,), int32(tails or range(len(shapes))))


def unturned(num_positions: int, dim: int) -> RotaryTables:
    """Rotation by nothing."""
    return RotaryTables(torch.ones(num_positions, dim // 2), torch.zeros(num_positions, dim // 2))
