"""Tiny random models, and steps of three sequences through them, for what computes on devices."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import torch
from engines import GREEDY

from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_shapes import expected_shapes
from pageferry.core.plan import Chunk
from pageferry.core.pool import PageId
from pageferry.core.sampling import StopParams
from pageferry.core.sequence import NO_PAGE, Sequence, WorkItem
from pageferry.engine.batch import Batch, BatchBuilder
from pageferry.engine.gpu_pages import DevicePages
from pageferry.engine.pages import PageTensors
from pageferry.engine.runner import ForwardPass

Steps: TypeAlias = "list[list[tuple[int, int, int]]]"
NUM_PAGES, MAX_POSITIONS = 24, 128
LLAMA = ModelConfig("tiny", "llama", 96, 48, 2, 4, 2, 8, 64, MAX_POSITIONS, 1e-5, 1e4, tied_embeddings=True)
MODELS = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, architecture="mistral", sliding_window=5),
    "qwen2": replace(LLAMA, architecture="qwen2", attention_bias=True, tied_embeddings=False),
    "qwen3": replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=16),
}
# (sequence, start, end) of the chunks of each step: prompts, one in two chunks and beside others' single tokens,
# then single tokens alone. Pages of 4 tokens fill within chunks, at their ends, and by single tokens.
STEPS: Steps = [
    [(0, 0, 7), (1, 0, 3)],
    [(0, 7, 8), (1, 3, 4), (2, 0, 9)],
    [(2, 9, 11), (0, 8, 9)],
    [(0, 9, 10), (1, 4, 5), (2, 11, 12)],
]


class RandomTensors:
    """`TensorFiles` of numbers that make every layer matter."""

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = expected_shapes(config)

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        shape = self.shapes[name]
        x = torch.randn(shape, generator=generator)
        values = 1 + 0.1 * x if name.endswith("norm.weight") else x / shape[-1] ** 0.5
        return values.to(dtype or torch.float32)

    def first_bytes(self, name: str) -> bytes:
        raise NotImplementedError

    def close(self) -> None: ...


def layout_of(config: ModelConfig, page_format: str, groups: str = "") -> CacheLayout:
    of = parse_groups(groups, config.num_layers, config.sliding_window)
    return CacheLayout("tested", PageFormat.parse(page_format), 4, config.num_kv_heads, config.head_dim, of)


def sequences(layout: CacheLayout) -> list[Sequence]:
    """Each on pages of its own."""
    made = []
    for i in range(3):
        ids = tuple(torch.randint(0, 96, (12,)).tolist())
        numbers = [8 * page + 3 * i for page in (2, 0, 1)]
        tables = [[PageId((page + group) % NUM_PAGES) for page in numbers] for group in range(len(layout.groups))]
        work = WorkItem(f"tested-{i}", ids, GREEDY, StopParams(max_tokens=1))
        made.append(Sequence(work, 0.0, tables=tables, tail=PageId(2 - i) if layout.format.has_tails else None))
    return made


def free(layout: CacheLayout, target: Sequence, start: int, end: int) -> None:
    """Give up what the schedulers would: pages behind a window."""
    for table, group in zip(target.tables, layout.groups, strict=True):
        live = set(group.live_pages(start, end, layout.page_size))
        for index in range(-(-end // layout.page_size)):
            if index not in live:
                table[index] = NO_PAGE


def batches(layout: CacheLayout, steps: Steps = STEPS) -> Iterator[Batch]:
    """Of all rows' logits."""
    builder, targets = BatchBuilder(layout), sequences(layout)
    for step in steps:
        for i, start, end in step:
            free(layout, targets[i], start, end)
        batch = builder.build(tuple(Chunk(targets[i], start, end - start, samples=True) for i, start, end in step))
        yield replace(batch, sampled_rows=torch.arange(len(batch.token_ids), dtype=torch.int32))


def blanked(pages: PageTensors) -> None:
    pages.blank(Place(group, PageId(page)) for group in range(len(pages.pools)) for page in range(NUM_PAGES))


def logits(model: ForwardPass, pages: PageTensors, steps: Steps = STEPS) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.inference_mode():
        blanked(pages)
        return [model.forward(batch, pages).clone() for batch in batches(pages.layout, steps)]


def pools(layout: CacheLayout, device: str) -> tuple[PageTensors, DevicePages]:
    counts = [NUM_PAGES] * len(layout.groups)
    return PageTensors(layout, counts, 3), DevicePages(layout, counts, 3, torch.device(device))
