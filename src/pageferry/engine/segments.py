"""Which pages and open tokens the rows of a batch read, by torch's attention."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout
from pageferry.core.memory import MAX_GATHERED
from pageferry.kernels.segment import Segment

_NEVER = 1 << 40  # a position, or a page's index, that no row sees


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence's part of a batch: its positions from `start` to `end`."""

    start: int
    end: int
    table: NDArray[np.int32]  # the cache group's, to the end
    index: int  # among the batch's parts
    first_row: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SegmentBuilder:
    """Of one cache group and a batch of `num_seqs` parts."""

    layout: CacheLayout
    group: CacheGroup
    num_seqs: int

    def build(self, members: list[Member]) -> list[Segment]:
        pages = [self._seen_pages(member) for member in members]
        segments = [
            self._segment([member], [seen])
            for member, seen in zip(members, pages, strict=True)
            if member.num_tokens > 1
        ]
        singles = [i for i, member in enumerate(members) if member.num_tokens == 1]
        for together in self._grouped(singles, [len(seen) for seen in pages]):
            together.sort()  # a segment's rows are in the batch's order
            segments.append(self._segment([members[i] for i in together], [pages[i] for i in together]))
        return segments

    def _seen_pages(self, member: Member) -> NDArray[np.int64]:
        """Indices of the stored pages that any of the part's tokens sees."""
        size, end = self.layout.page_size, member.end
        if self.layout.tails:
            end -= end % size
        sinks, seen = self.group.live_ranges(member.start, end, size)
        behind = np.arange(seen.start, seen.stop)
        return np.concatenate((np.arange(sinks.stop), behind)) if sinks else behind

    def _grouped(self, singles: list[int], num_pages: list[int]) -> Iterable[list[int]]:
        """Sequences of like length together, so that padding adds at most half, in groups that fit the cache."""
        numbers_per_page = self.layout.page_size * 2 * self.layout.num_kv_heads * self.layout.head_dim
        together: list[int] = []
        for i in sorted(singles, key=lambda i: num_pages[i], reverse=True):
            longest = num_pages[together[0]] if together else 0
            size = (len(together) + 1) * longest * numbers_per_page
            if together and (size > MAX_GATHERED or num_pages[i] * 2 < longest):
                yield together
                together = []
            together.append(i)
        if together:
            yield together

    def _segment(self, members: list[Member], pages: list[NDArray[np.int64]]) -> Segment:
        size, num_rows = self.layout.page_size, members[0].num_tokens
        width = max(len(seen) for seen in pages)
        tables = np.zeros((len(members), width), dtype=np.int64)
        indices = np.full((len(members), width), _NEVER)
        for i, (member, seen) in enumerate(zip(members, pages, strict=True)):
            tables[i, : len(seen)] = member.table[seen]
            tables[i, len(seen) :] = tables[i, :1]  # a padding page's slots count as unused
            indices[i, : len(seen)] = seen
        assert tables.size == 0 or tables.min() >= 0, "a page that is to be read is not held"
        stored = (indices[:, :, None] * size + np.arange(size)).reshape(len(members), -1)  # each slot's position
        ends = np.array([member.end for member in members])
        page, slot = np.nonzero((stored >= ends[:, None]).reshape(-1, size))
        first_rows = np.array([member.first_row for member in members])
        rows = (first_rows[:, None] + np.arange(num_rows)).reshape(-1)
        queries = torch.from_numpy(ends[:, None] - num_rows + np.arange(num_rows))[:, :, None]  # [S, R, 1]
        positions, opened = self._open_tokens(members) if self.layout.tails else (None, None)
        hidden = self._hidden(queries, torch.from_numpy(stored[:, None]), positions)
        columns = hidden.any(dim=1).any(dim=0).nonzero()
        return Segment(
            torch.from_numpy(rows),
            torch.from_numpy(tables.reshape(-1)),
            len(members),
            torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")),
            int(columns[0]) if len(columns) else hidden.shape[2],
            (torch.from_numpy(page), torch.from_numpy(slot)),
            opened,
        )

    def _hidden(self, queries: Tensor, stored: Tensor, opened: Tensor | None) -> Tensor:
        """[S, R, columns], of the positions in pages and of those that may be open."""
        hidden = self._outside(queries, stored)
        if opened is None:
            return hidden
        size = self.layout.page_size
        first_open = (queries + 1).div(size, rounding_mode="floor") * size
        in_tail = self._outside(queries, opened) | (opened < first_open)
        return torch.cat((hidden | (stored >= first_open), in_tail), dim=-1)

    def _outside(self, queries: Tensor, positions: Tensor) -> Tensor:
        outside = positions > queries
        if self.group.window is not None:
            outside |= (positions <= queries - self.group.window) & (positions >= self.group.sinks)
        return outside

    def _open_tokens(self, members: list[Member]) -> tuple[Tensor, Tensor]:
        """Positions [S, 1, m] that some row may see open, and where OpenTokens have them [S * m]."""
        size = self.layout.page_size
        starts = [(member.start + 1) // size * size for member in members]
        width = max(member.end - start for member, start in zip(members, starts, strict=True))
        positions = np.full((len(members), width), _NEVER)
        sources = np.empty((len(members), width), dtype=np.int64)
        for i, (member, first) in enumerate(zip(members, starts, strict=True)):
            tokens = np.arange(first, member.end)
            own_row = self.num_seqs * size + member.first_row
            positions[i, : len(tokens)] = tokens
            in_tail, in_batch = member.index * size + tokens % size, own_row + tokens - member.start
            sources[i, : len(tokens)] = np.where(tokens < member.start, in_tail, in_batch)
            sources[i, len(tokens) :] = own_row  # no other sequence's number, which may be NaN
        return torch.from_numpy(positions[:, None]), torch.from_numpy(sources.reshape(-1))
