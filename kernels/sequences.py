"""A flat batch as the compiled kernels read it: which rows are whose, at which positions, on which pages."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pageferry.kernels import cpu_library
from pageferry.kernels.cpu_library import address


@dataclass(frozen=True, slots=True)
class PageTables:
    """The sequences' page tables in one cache group; all tensors are int32."""

    starts: Tensor  # [S + 1]
    pages: Tensor  # one table after the other; each reaches to its sequence's last position, −1 where no page is held


@dataclass(frozen=True)
class Sequences:
    """S sequences of T rows in all; a sequence's rows have consecutive positions. All tensors are int32."""

    positions: Tensor  # [T]
    row_starts: Tensor  # [S + 1]
    tables: tuple[PageTables, ...]  # of each cache group
    tails: Tensor | None = None  # [S], where the page format has tails

    @cached_property
    def struct(self) -> cpu_library.Batch:
        """For the compiled kernels; points into the tensors."""
        tables = (cpu_library.Tables * len(self.tables))(
            *((address(table.starts, torch.int32), address(table.pages, torch.int32)) for table in self.tables)
        )
        return cpu_library.Batch(
            positions=address(self.positions, torch.int32),
            row_starts=address(self.row_starts, torch.int32),
            tables=tables,
            tails=address(self.tails, torch.int32),
            num_rows=len(self.positions),
            num_seqs=len(self.row_starts) - 1,
        )
