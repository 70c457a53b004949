"""A batch as the Triton kernels take it: on the device, with page tables of one width."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.layout import CacheLayout
from pageferry.engine.batch import Batch
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.append_tails import TouchedPages
from pageferry.kernels.gpu.page_arguments import SequencePages
from pageferry.kernels.gpu.paged_prefill import Chunks

Numbers = NDArray[np.int32]
_ALIGN = 4  # numbers; kernels are compiled for pointers to multiples of 16 bytes
TABLE_STEP = 16  # pages by which tables grow


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Of one cache group."""

    sequences: SequencePages
    pages: Tensor  # [T] int32 where each token goes; below 0 nowhere


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a batch that are attended together: those of one row each, or chunks of more."""

    groups: tuple[GroupPages, ...]
    slots: Tensor  # [T] int32
    rows: Tensor | None = None  # [T] of the batch; None: all
    chunks: Chunks | None = None  # None: one row each
    touched: TouchedPages | None = None  # of chunks with tails


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    parts: tuple[Part, ...]
    sampled_rows: Tensor | None = None  # [S] int32; None: all, in their order


class Upload:
    """Arrays of numbers that go to the device as one copy, through pinned memory where there is a GPU.

    What was taken is overwritten by the next call, which must come after the step is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._pinned(1 << 16)

    def __call__(self, arrays: ListLike[Numbers], into: Tensor | None = None) -> list[Tensor]:
        """Views of a new buffer, or of `into`, which earlier calls with arrays as long have given."""
        lengths = _padded_lengths(arrays)
        size = sum(lengths)
        if len(self._host) < size:
            self._host = self._pinned(2 * size)
        numbers, start = self._host.numpy(), 0
        for array, length in zip(arrays, lengths, strict=True):
            numbers[start : start + array.size] = array.reshape(-1)
            start += length
        into = self.buffer(arrays) if into is None else into
        into.copy_(self._host[:size], non_blocking=True)
        parts = into.split(lengths)
        return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def buffer(self, arrays: ListLike[Numbers]) -> Tensor:
        """Room on the device for arrays as long."""
        return torch.empty(sum(_padded_lengths(arrays)), dtype=torch.int32, device=self._device)

    def _pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def _padded_lengths(arrays: ListLike[Numbers]) -> list[int]:
    return [-(-array.size // _ALIGN) * _ALIGN for array in arrays]


@dataclass(frozen=True)
class HostBatch:
    """What of a batch decides how it is attended, as numpy has it."""

    layout: CacheLayout
    batch: Batch

    @cached_property
    def row_starts(self) -> Numbers:
        starts: Numbers = self.batch.sequences.row_starts.numpy()
        return starts

    @cached_property
    def counts(self) -> Numbers:
        return np.diff(self.row_starts)

    @cached_property
    def lengths(self) -> Numbers:
        """Of each sequence, the batch's tokens included."""
        lengths: Numbers = self.batch.sequences.positions.numpy()[self.row_starts[1:] - 1] + 1
        return lengths

    @cached_property
    def width(self) -> int:
        """Pages of the longest sequence."""
        return int(self.lengths.max() + self.layout.page_size - 1) // self.layout.page_size

    def tables(self, group: int, members: Numbers, num_rows: int, width: int) -> Numbers:
        """[num_rows, width], padded with −1."""
        of_group = self.batch.sequences.tables[group]
        starts, pages = of_group.starts.numpy(), of_group.pages.numpy()
        tables = np.full((num_rows, width), -1, np.int32)
        for row, member in enumerate(members):
            start, end = starts[member], starts[member + 1]
            tables[row, : end - start] = pages[start:end]
        return tables

    def part(self, members: Numbers, *, num_seqs: int | None = None, width: int | None = None) -> list[Numbers]:
        """Arrays of some sequences for `read_part`: lengths, tails, slots, and of each group tables and pages.

        Padded to `num_seqs` sequences of no tokens, where all have one row.
        """
        rows, sizes = self.rows(members), self.counts[members]
        padded = len(members) if num_seqs is None else num_seqs
        more = padded - len(members)
        positions = self.batch.sequences.positions.numpy()[rows]
        tails = self.batch.sequences.tails
        of_tails = np.zeros(len(members), np.int32) if tails is None else tails.numpy()[members]
        width = -(-self.width // TABLE_STEP) * TABLE_STEP if width is None else width
        arrays = [np.pad(self.lengths[members], (0, more)), np.pad(of_tails, (0, more))]
        arrays.append(np.pad(positions % self.layout.page_size, (0, more)))
        of_row = np.repeat(np.arange(len(members)), sizes)
        for group in range(len(self.layout.groups)):
            tables = self.tables(group, members, padded, width)
            pages = tables[of_row, positions // self.layout.page_size]
            arrays += [tables, np.pad(pages, (0, more), constant_values=-1)]
        return arrays

    def rows(self, members: Numbers) -> Numbers:
        starts = self.row_starts
        parts = [np.arange(starts[i], starts[i + 1], dtype=np.int32) for i in members]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


def read_part(tensors: list[Tensor], layout: CacheLayout) -> Part:
    """Of what `HostBatch.part` gave, on the device."""
    lengths, tails, slots, *rest = tensors
    held = tails if layout.format.has_tails else None
    groups = [
        GroupPages(SequencePages(tables, lengths, held), pages)
        for tables, pages in zip(rest[::2], rest[1::2], strict=True)
    ]
    return Part(tuple(groups), slots)


@dataclass(frozen=True, slots=True)
class DeviceBatchBuilder:
    layout: CacheLayout
    num_heads: int
    dtype: torch.dtype  # of products
    upload: Upload

    def build(self, host: HostBatch, layer: LayerPages) -> DeviceBatch:
        counts, batch = host.counts, host.batch
        members = [np.flatnonzero(chosen).astype(np.int32) for chosen in (counts == 1, counts > 1)]
        arrays = [batch.token_ids.numpy(), batch.sequences.positions.numpy(), batch.sampled_rows.numpy()]
        parts = [(chosen, host.part(chosen)) for chosen in members if len(chosen)]
        for chosen, of_part in parts:
            arrays += [host.rows(chosen), *of_part]
        token_ids, positions, sampled_rows, *rest = self.upload(arrays)
        built, size = [], 1 + len(parts[0][1])
        for i, (chosen, _) in enumerate(parts):
            rows, *tensors = rest[i * size : (i + 1) * size]
            is_whole = len(parts) == 1
            built.append(self._part(host, chosen, None if is_whole else rows, read_part(tensors, self.layout), layer))
        return DeviceBatch(token_ids, positions, tuple(built), sampled_rows)

    def _part(self, host: HostBatch, members: Numbers, rows: Tensor | None, part: Part, layer: LayerPages) -> Part:
        counts = host.counts[members].tolist()
        if max(counts) == 1:
            return Part(part.groups, part.slots, rows)
        chunks = Chunks.of(counts, self.num_heads, layer, self.dtype)
        touched = None
        if self.layout.format.has_tails:
            lengths = host.lengths[members].tolist()
            touched = TouchedPages.of(lengths, chunks.starts, counts, self.layout.page_size)
        return Part(part.groups, part.slots, rows, chunks, touched)
