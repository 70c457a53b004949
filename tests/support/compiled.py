"""Compiled kernels for tests: every instruction set the machine has, and sequences on pages of their own."""

from collections.abc import Sequence as Sequences_

import page_pools
import pytest
import torch

from pageferry.kernels.append_pages import LayerPages, append_pages, is_compiled
from pageferry.kernels.cpu_library import CpuKernels, Isa, available_isas, load_kernels
from pageferry.kernels.sequences import Sequences

ISAS = available_isas()
FORMATS = tuple(page_format for page_format in page_pools.FORMATS if is_compiled(page_pools.layout(page_format)))
needs_library = pytest.mark.skipif(not ISAS, reason="the library was not built: no compiler at installation")
each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())


def kernels(isa: Isa = Isa.PORTABLE, num_threads: int = 1) -> CpuKernels:
    loaded = load_kernels(num_threads, isa)
    assert loaded is not None
    return loaded


def int32(values: Sequences_[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sequences(shapes: list[tuple[int, int]], tables: list[list[int]]) -> Sequences:
    """Of (start, rows in the batch) each, on the pages of `tables`."""
    row_starts, table_starts = [0], [0]
    for (_, count), table in zip(shapes, tables, strict=True):
        row_starts.append(row_starts[-1] + count)
        table_starts.append(table_starts[-1] + len(table))
    positions = [position for start, count in shapes for position in range(start, start + count)]
    flat = [page for table in tables for page in table]
    return Sequences(int32(positions), int32(row_starts), int32(table_starts), int32(flat))


def fill(layer: LayerPages, table: list[int], length: int, seed: int) -> None:
    """Keys and values of `length` tokens, the same for a seed whatever else is stored."""
    _, num_kv_heads, page_size, dim = layer.keys.payload.shape
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, length, num_kv_heads, dim, generator=random)
    positions = torch.arange(length)
    append_pages(layer, keys, values, torch.tensor(table)[positions // page_size], positions % page_size)
