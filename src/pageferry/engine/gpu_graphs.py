"""Decode steps as CUDA graphs, one for each of a few batch sizes and widths of page tables."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pageferry.core.layout import CacheLayout
from pageferry.engine.gpu_batch import TABLE_STEP, DeviceBatch, HostBatch, Numbers, Upload, read_part

_SHORTEST = 1024  # tokens of the narrowest tables; each wider ones are of four times as many


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # what `Upload` fills
    logits: Tensor  # [batch, vocab]


class DecodeGraphs:
    """Steps of at most `max_num_seqs` sequences with one row each.

    A batch is padded to the next size with sequences of no tokens, which write nothing and read nothing.
    """

    def __init__(self, layout: CacheLayout, upload: Upload, max_positions: int, max_num_seqs: int) -> None:
        self._layout = layout
        self._upload = upload
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self.sizes = batch_sizes(max_num_seqs)
        self.widths = table_widths(max_positions, layout.page_size)

    def capture(self, device: torch.device, compute: Callable[[DeviceBatch], Tensor]) -> None:
        """Run each once, so that all is compiled, and record it; the largest first, whose memory the others share."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        for width in reversed(self.widths):
            for size in reversed(self.sizes):
                arrays = padding(self._layout, size, width)
                inputs = self._upload.buffer(arrays)
                batch = as_batch(self._upload(arrays, inputs), self._layout)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    compute(batch)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = compute(batch)
                self._graphs[size, width] = _Graph(graph, inputs, logits)

    def run(self, host: HostBatch) -> Tensor | None:
        """Logits of all rows, valid until the next call; None for what no graph can do."""
        num_seqs = len(host.counts)
        size = next((size for size in self.sizes if size >= num_seqs), None)
        width = next((width for width in self.widths if width >= host.width), None)
        if size is None or width is None or host.counts.max() > 1:
            return None
        captured = self._graphs[size, width]
        self._upload(arrays_of(host, size, width), captured.inputs)
        captured.graph.replay()
        return captured.logits[:num_seqs]


def arrays_of(host: HostBatch, size: int, width: int) -> list[Numbers]:
    """A decode step's, padded."""
    num_seqs = len(host.counts)
    more = size - num_seqs
    ids, positions = host.batch.token_ids.numpy(), host.batch.sequences.positions.numpy()
    members = np.arange(num_seqs, dtype=np.int32)
    part = host.part(members, num_seqs=size, width=width)
    return [np.pad(ids, (0, more)), np.pad(positions, (0, more)), *part]


def padding(layout: CacheLayout, size: int, width: int) -> list[Numbers]:
    """A step of no tokens: as `arrays_of`."""
    zeros, nowhere = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    table = np.full((size, width), -1, np.int32)
    return [zeros, zeros, zeros, zeros, zeros, *([table, nowhere] * len(layout.groups))]


def as_batch(tensors: list[Tensor], layout: CacheLayout) -> DeviceBatch:
    token_ids, positions, *part = tensors
    return DeviceBatch(token_ids, positions, (read_part(part, layout),))


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96 …, and the largest."""
    sizes, step = [1, 2, 4, 8], 8
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + step)
        if sizes[-1] >= 4 * step:
            step *= 2
    return tuple(sorted({min(size, max_num_seqs) for size in sizes}))


def table_widths(max_positions: int, page_size: int) -> tuple[int, ...]:
    """Pages, multiples of TABLE_STEP, of 1,024 tokens, 4,096 and so on, up to the longest sequence's."""
    widths, tokens = [], min(_SHORTEST, max_positions)
    while True:
        widths.append(-(-tokens // (TABLE_STEP * page_size)) * TABLE_STEP)
        if tokens == max_positions:
            return tuple(widths)
        tokens = min(4 * tokens, max_positions)
