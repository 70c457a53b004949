"""A plan's chunks as the flat tensors of one forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.layout import CacheLayout
from pageferry.core.plan import Chunk
from pageferry.engine.segments import Member, SegmentBuilder
from pageferry.kernels.segment import Segment
from pageferry.kernels.sequences import PageTables, Sequences
from pageferry.kernels.tails import TailTargets


class TokenTargets(NamedTuple):
    """Where each of a batch's T tokens goes; int64."""

    pages: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class TorchPlaces:
    """What torch needs besides, in one cache group, to store keys and values and to attend."""

    targets: TokenTargets | TailTargets
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [T] int32
    sequences: Sequences
    sampled_rows: Tensor  # [S] int32: rows whose logits are wanted, the last ones of chunks, in the plan's order
    places: tuple[TorchPlaces, ...]  # of each cache group; none unless torch attends


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """What of the layout decides how a batch is laid out.

    Where the compiled kernels take the batch, numpy alone makes it: torch's calls let go of the interpreter's lock, and
    the event loop, which has the last step's tokens to send just then, would keep it from the engine.
    """

    layout: CacheLayout
    for_torch: bool = True  # whether torch attends

    def build(self, chunks: tuple[Chunk, ...]) -> Batch:
        counts = np.array([chunk.num_tokens for chunk in chunks])
        starts = _starts(counts)
        before = np.array([chunk.start for chunk in chunks], np.int32) - starts[:-1]
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(before, counts)
        ids: list[int] = []
        for chunk in chunks:
            ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        ends = starts[1:].tolist()
        num_rows = [max(chunk.num_prompt_rows, int(chunk.samples)) for chunk in chunks]
        wanted = [row for end, num in zip(ends, num_rows, strict=True) for row in range(end - num, end)]
        tables = self._tables(chunks)
        sequences = Sequences(
            positions=torch.from_numpy(positions),
            row_starts=torch.from_numpy(starts),
            tables=tables,
            tails=torch.from_numpy(_tails(chunks)) if self.layout.format.has_tails else None,
        )
        return Batch(
            token_ids=torch.from_numpy(np.array(ids, np.int32)),
            sequences=sequences,
            sampled_rows=torch.from_numpy(np.array(wanted, np.int32)),
            places=self._places(chunks, starts.tolist(), tables) if self.for_torch else (),
        )

    def _tables(self, chunks: tuple[Chunk, ...]) -> tuple[PageTables, ...]:
        lengths = [self.layout.num_pages(chunk.start + chunk.num_tokens) for chunk in chunks]
        starts, tables = _starts(np.array(lengths)), []
        for group in range(len(self.layout.groups)):
            # Bytes as they lie in the tables' arrays: a context of any length is one copy.
            parts = [memoryview(c.sequence.tables[group])[:end] for c, end in zip(chunks, lengths, strict=True)]  # type: ignore[arg-type]
            flat = np.frombuffer(bytearray().join(parts), np.int32)
            tables.append(PageTables(torch.from_numpy(starts), torch.from_numpy(flat)))
        return tuple(tables)

    def _places(
        self, chunks: tuple[Chunk, ...], starts: list[int], tables: tuple[PageTables, ...]
    ) -> tuple[TorchPlaces, ...]:
        size = self.layout.page_size
        opened = self._tail_targets(chunks, starts) if self.layout.format.has_tails else None
        places = []
        for group, of_group in zip(self.layout.groups, tables, strict=True):
            flat, bounds = of_group.pages.numpy(), of_group.starts.tolist()
            members = [Member(c, flat[bounds[i] : bounds[i + 1]], i, starts[i]) for i, c in enumerate(chunks)]
            targets: TokenTargets | TailTargets
            if opened:
                filled = [member.table[member.chunk.start // size : member.end // size] for member in members]
                targets = replace(opened, filled=_pages(filled))
            else:
                positions = [np.arange(member.chunk.start, member.end) for member in members]
                pages = [member.table[rows // size] for rows, member in zip(positions, members, strict=True)]
                targets = TokenTargets(_pages(pages), torch.from_numpy(np.concatenate(positions) % size))
            builder = SegmentBuilder(self.layout, group, num_seqs=len(chunks))
            places.append(TorchPlaces(targets, builder.build(members)))
        return tuple(places)

    def _tail_targets(self, chunks: tuple[Chunk, ...], starts: list[int]) -> TailTargets:
        """All but the pages, which are each group's own."""
        size, tails = self.layout.page_size, _tails(chunks).tolist()
        sources: list[int] = []
        begun: list[int] = []
        kept: list[tuple[int, int, int]] = []
        for i, chunk in enumerate(chunks):
            end, row = chunk.start + chunk.num_tokens, starts[i] - chunk.start  # the row of position 0
            first_full, first_kept = chunk.start // size * size, max(chunk.start, end // size * size)
            before, after = i * size - first_full, len(chunks) * size + row
            sources += [t + (before if t < chunk.start else after) for t in range(first_full, end // size * size)]
            kept += [(row + t, tails[i], t % size) for t in range(first_kept, end)]
            if first_kept < end and first_kept % size == 0:
                begun.append(tails[i])
        rows, kept_tails, slots = zip(*kept, strict=True) if kept else ((), (), ())
        lists = (tails, (), sources, begun, rows, kept_tails, slots)
        return TailTargets(*(torch.tensor(numbers, dtype=torch.int64) for numbers in lists))


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Where each run of that many begins, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _tails(chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    tails = [chunk.sequence.tail for chunk in chunks]
    assert None not in tails, "a sequence runs without a tail"
    return np.array(tails, np.int32)


def _pages(parts: Iterable[NDArray[np.int32]]) -> Tensor:
    """int64; pages that are written."""
    pages = np.concatenate(list(parts)).astype(np.int64)
    assert pages.size == 0 or pages.min() >= 0, "a page that is to be written is not held"
    return torch.from_numpy(pages)
