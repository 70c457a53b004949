"""A plan's chunks as the flat tensors of one forward pass."""

from collections.abc import Iterable, Sequence as ListLike
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.layout import CacheLayout
from pageferry.core.plan import Chunk
from pageferry.core.sequence import Sequence
from pageferry.engine.segments import Member, SegmentBuilder
from pageferry.kernels.segment import Segment
from pageferry.kernels.sequences import PageTables, Sequences
from pageferry.kernels.tails import TailTargets


class TokenTargets(NamedTuple):
    """Where each of a batch's T tokens goes; int64."""

    pages: Tensor
    slots: Tensor


class Part(NamedTuple):
    """A sequence's part of a batch: tokens at positions from `start` on; logits are wanted of the last `num_sampled`.

    What lies before `start` is computed.
    """

    sequence: Sequence
    start: int
    token_ids: ListLike[int]
    num_sampled: int

    @classmethod
    def of(cls, chunk: Chunk, drafts: ListLike[int] = ()) -> "Part":
        own = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        return cls(
            chunk.sequence, chunk.start, [*own, *drafts], max(chunk.num_prompt_rows, (1 + len(drafts)) * chunk.samples)
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TorchPlaces:
    """What torch needs besides, in one cache group, to store keys and values and to attend."""

    targets: TokenTargets | TailTargets
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [T] int32
    sequences: Sequences
    sampled_rows: Tensor  # [S] int32: rows whose logits are wanted, in order
    places: tuple[TorchPlaces, ...]  # of each cache group; none unless torch attends


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """What of the layout decides how a batch is laid out.

    Where the compiled kernels take the batch, numpy alone makes it: torch's calls let go of the interpreter's lock, and
    the event loop, which has the last step's tokens to send just then, would keep it from the engine.
    """

    layout: CacheLayout
    for_torch: bool = True  # whether torch attends
    group_of: tuple[int, ...] = ()  # which of a sequence's page tables the layout's groups have, if not their own

    def build(self, chunks: Iterable[Chunk]) -> Batch:
        """Without drafts."""
        return self.build_parts([Part.of(chunk) for chunk in chunks])

    def build_parts(self, parts: ListLike[Part]) -> Batch:
        """Each of another sequence."""
        counts = np.array([part.num_tokens for part in parts])
        starts = _starts(counts)
        before = np.array([part.start for part in parts], np.int32) - starts[:-1]
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(before, counts)
        ids: list[int] = []
        for part in parts:
            ids += part.token_ids
        sampled = _sampled_rows(parts, starts)
        tables = self._tables(parts)
        sequences = Sequences(
            positions=torch.from_numpy(positions),
            row_starts=torch.from_numpy(starts),
            tables=tables,
            tails=torch.from_numpy(_tails(parts)) if self.layout.format.has_tails else None,
        )
        return Batch(
            token_ids=torch.from_numpy(np.array(ids, np.int32)),
            sequences=sequences,
            sampled_rows=torch.from_numpy(sampled),
            places=self._places(parts, starts.tolist(), tables) if self.for_torch else (),
        )

    def _tables(self, parts: ListLike[Part]) -> tuple[PageTables, ...]:
        lengths = [self.layout.num_pages(part.end) for part in parts]
        starts, tables = _starts(np.array(lengths)), []
        for group in self.group_of or range(len(self.layout.groups)):
            # Bytes as they lie in the tables' arrays: a context of any length is one copy.
            views = [memoryview(p.sequence.tables[group])[:end] for p, end in zip(parts, lengths, strict=True)]  # type: ignore[arg-type]
            flat = np.frombuffer(bytearray().join(views), np.int32)
            tables.append(PageTables(torch.from_numpy(starts), torch.from_numpy(flat)))
        return tuple(tables)

    def _places(
        self, parts: ListLike[Part], starts: list[int], tables: tuple[PageTables, ...]
    ) -> tuple[TorchPlaces, ...]:
        size = self.layout.page_size
        opened = self._tail_targets(parts, starts) if self.layout.format.has_tails else None
        places = []
        for group, of_group in zip(self.layout.groups, tables, strict=True):
            flat, bounds = of_group.pages.numpy(), of_group.starts.tolist()
            members = [
                Member(p.start, p.end, flat[bounds[i] : bounds[i + 1]], i, starts[i]) for i, p in enumerate(parts)
            ]
            targets: TokenTargets | TailTargets
            if opened:
                filled = [member.table[member.start // size : member.end // size] for member in members]
                targets = replace(opened, filled=_pages(filled))
            else:
                positions = [np.arange(member.start, member.end) for member in members]
                pages = [member.table[rows // size] for rows, member in zip(positions, members, strict=True)]
                targets = TokenTargets(_pages(pages), torch.from_numpy(np.concatenate(positions) % size))
            builder = SegmentBuilder(self.layout, group, num_seqs=len(parts))
            places.append(TorchPlaces(targets, builder.build(members)))
        return tuple(places)

    def _tail_targets(self, parts: ListLike[Part], starts: list[int]) -> TailTargets:
        """All but the pages, which are each group's own."""
        size, tails = self.layout.page_size, _tails(parts).tolist()
        sources: list[int] = []
        begun: list[int] = []
        kept: list[tuple[int, int, int]] = []
        for i, part in enumerate(parts):
            end, row = part.end, starts[i] - part.start  # the row of position 0
            first_full, first_kept = part.start // size * size, max(part.start, end // size * size)
            before, after = i * size - first_full, len(parts) * size + row
            sources += [t + (before if t < part.start else after) for t in range(first_full, end // size * size)]
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


def _sampled_rows(parts: ListLike[Part], starts: NDArray[np.int32]) -> NDArray[np.int32]:
    counts = [part.num_sampled for part in parts]
    if max(counts) <= 1:  # as mostly
        ends: NDArray[np.int32] = starts[1:][np.array(counts, bool)]
        return ends - 1
    last = starts[1:].tolist()
    rows = [row for end, count in zip(last, counts, strict=True) for row in range(end - count, end)]
    return np.array(rows, np.int32)


def _tails(parts: ListLike[Part]) -> NDArray[np.int32]:
    tails = [part.sequence.tail for part in parts]
    assert None not in tails, "a sequence runs without a tail"
    return np.array(tails, np.int32)


def _pages(parts: Iterable[NDArray[np.int32]]) -> Tensor:
    """int64; pages that are written."""
    pages = np.concatenate(list(parts)).astype(np.int64)
    assert pages.size == 0 or pages.min() >= 0, "a page that is to be written is not held"
    return torch.from_numpy(pages)
