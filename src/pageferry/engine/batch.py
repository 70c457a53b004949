"""A plan's chunks as the flat tensors of one forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.plan import Chunk
from pageferry.kernels.paged_attention import Segment
from pageferry.kernels.sequences import Sequences

# Numbers (K and V of one layer, fp32) that a segment of several sequences gathers at most: 8 MB stay near the cache,
# and buffers of up to 32 MB are reused by the allocator instead of being mapped anew each time.
MAX_GATHERED = 1 << 21


@dataclass(frozen=True, slots=True)
class TorchPlaces:
    """What torch needs besides to store keys and values and to attend; int64 but for the masks."""

    pages: Tensor  # [T] where each token's keys and values go
    slots: Tensor  # [T]
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [T] int32
    sequences: Sequences
    sampled_rows: Tensor  # [S] int32: last row of each chunk that samples, in the plan's order
    places: TorchPlaces | None  # only where torch attends


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """What of model and pool decides how a batch is laid out.

    Where the compiled kernels take the batch, numpy alone makes it: torch's calls let go of the interpreter's lock, and
    the event loop, which has the last step's tokens to send just then, would keep it from the engine.
    """

    page_size: int
    window: int | None
    numbers_per_token: int  # of one layer's keys and values
    for_torch: bool = True  # whether torch attends

    def build(self, chunks: tuple[Chunk, ...]) -> Batch:
        starts = _starts([chunk.num_tokens for chunk in chunks])
        ids = [token_id for c in chunks for token_id in c.sequence.token_ids[c.start : c.start + c.num_tokens]]
        positions = np.concatenate([np.arange(c.start, c.start + c.num_tokens, dtype=np.int32) for c in chunks])
        lengths = [-(-(c.start + c.num_tokens) // self.page_size) for c in chunks]
        pages = chain.from_iterable(c.sequence.pages[:length] for c, length in zip(chunks, lengths, strict=True))
        table_starts = _starts(lengths)
        sampled = [starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
        sequences = Sequences(
            positions=torch.from_numpy(positions),
            row_starts=torch.from_numpy(starts),
            table_starts=torch.from_numpy(table_starts),
            table=torch.from_numpy(np.fromiter(pages, np.int32, table_starts[-1])),
        )
        return Batch(
            token_ids=torch.from_numpy(np.array(ids, np.int32)),
            sequences=sequences,
            sampled_rows=torch.from_numpy(np.array(sampled, np.int32)),
            places=self._places(chunks, starts) if self.for_torch else None,
        )

    def _places(self, chunks: tuple[Chunk, ...], starts: NDArray[np.int32]) -> TorchPlaces:
        positions = [np.arange(c.start, c.start + c.num_tokens) for c in chunks]
        tables = [np.asarray(c.sequence.pages, dtype=np.int64) for c in chunks]
        pages = [table[rows // self.page_size] for rows, table in zip(positions, tables, strict=True)]
        return TorchPlaces(
            pages=torch.from_numpy(np.concatenate(pages)),
            slots=torch.from_numpy(np.concatenate(positions) % self.page_size),
            segments=self._segments(chunks, tables, starts.astype(np.int64)),
        )

    def _segments(
        self, chunks: tuple[Chunk, ...], tables: list[NDArray[np.int64]], starts: NDArray[np.int64]
    ) -> list[Segment]:
        segments = [
            self._segment([(chunk, table)], torch.arange(start, start + chunk.num_tokens))
            for chunk, table, start in zip(chunks, tables, starts, strict=False)
            if chunk.num_tokens > 1
        ]
        singles = [i for i, chunk in enumerate(chunks) if chunk.num_tokens == 1]
        for group in self._grouped(singles, [self._num_pages(chunk) for chunk in chunks]):
            group.sort()  # a segment's rows are in the batch's order
            rows = torch.from_numpy(starts[group])
            segments.append(self._segment([(chunks[i], tables[i]) for i in group], rows))
        return segments

    def _grouped(self, singles: list[int], num_pages: list[int]) -> Iterable[list[int]]:
        """Sequences of like length together, so that padding adds at most half, in groups that fit the cache."""
        group: list[int] = []
        for i in sorted(singles, key=lambda i: num_pages[i], reverse=True):
            longest = num_pages[group[0]] if group else 0
            size = (len(group) + 1) * longest * self.page_size * self.numbers_per_token
            if group and (size > MAX_GATHERED or num_pages[i] * 2 < longest):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _first_page(self, chunk: Chunk) -> int:
        """The first page that any of the chunk's tokens sees."""
        return 0 if self.window is None else max(0, chunk.start - self.window + 1) // self.page_size

    def _num_pages(self, chunk: Chunk) -> int:
        return -(-(chunk.start + chunk.num_tokens) // self.page_size) - self._first_page(chunk)

    def _segment(self, members: list[tuple[Chunk, NDArray[np.int64]]], rows: Tensor) -> Segment:
        width = max(self._num_pages(chunk) for chunk, _ in members)
        num_rows = members[0][0].num_tokens
        tables = np.empty((len(members), width), dtype=np.int64)
        keys = np.empty((len(members), width, self.page_size), dtype=np.int64)  # the position that each slot holds
        for i, (chunk, table) in enumerate(members):
            first, count = self._first_page(chunk), self._num_pages(chunk)
            tables[i, :count] = table[first : first + count]
            tables[i, count:] = table[first]
            keys[i] = np.arange(first * self.page_size, (first + width) * self.page_size).reshape(width, -1)
        ends = np.array([chunk.start + chunk.num_tokens for chunk, _ in members])
        page, slot = np.nonzero((keys >= ends[:, None, None]).reshape(-1, self.page_size))
        queries = torch.from_numpy(ends[:, None] - num_rows + np.arange(num_rows))[:, :, None]  # [S, R, 1]
        seen = torch.from_numpy(keys.reshape(len(members), 1, -1))
        hidden = seen > queries
        if self.window is not None:
            hidden |= seen <= queries - self.window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        columns = hidden.any(dim=1).any(dim=0).nonzero()
        masked_from = int(columns[0]) if len(columns) else hidden.shape[2]
        return Segment(
            rows,
            torch.from_numpy(tables.reshape(-1)),
            len(members),
            mask,
            masked_from,
            (torch.from_numpy(page), torch.from_numpy(slot)),
        )


def _starts(counts: list[int]) -> NDArray[np.int32]:
    """Where each run of that many begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
