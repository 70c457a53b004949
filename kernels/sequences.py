"""A flat batch as the compiled kernels read it: which rows are whose, at which positions, on which pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageferry.kernels import cpu_library
from pageferry.kernels.cpu_library import address


@dataclass(frozen=True, slots=True)
class PageTables:
    """The sequences' page tables in one cache group; all tensors are int32."""

    starts: Tensor  # [S + 1]
    pages: Tensor  # one table after the other; each reaches to its sequence's last position, −1 where no page is held


@dataclass(frozen=True, slots=True)
class Sequences:
    """S sequences of T rows in all; a sequence's rows have consecutive positions. All tensors are int32."""

    positions: Tensor  # [T]
    row_starts: Tensor  # [S + 1]
    tables: tuple[PageTables, ...]  # of each cache group
    tails: Tensor | None = None  # [S], where the page format has tails

    def struct(
        self, group: int = 0, token_ids: Tensor | None = None, sampled_rows: Tensor | None = None
    ) -> cpu_library.Batch:
        """Points into the tensors, which must outlive it."""
        return cpu_library.Batch(
            token_ids=address(token_ids, torch.int32),
            positions=address(self.positions, torch.int32),
            row_starts=address(self.row_starts, torch.int32),
            table_starts=address(self.tables[group].starts, torch.int32),
            table=address(self.tables[group].pages, torch.int32),
            sampled_rows=address(sampled_rows, torch.int32),
            num_rows=len(self.positions),
            num_seqs=len(self.row_starts) - 1,
            num_sampled=0 if sampled_rows is None else len(sampled_rows),
        )
