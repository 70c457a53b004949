"""The forward pass in Triton kernels against torch's, over chunks, single tokens and both in one batch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, relative_error
from gguf_writer import write_gguf
from tiny_gguf import METADATA, gguf_tensors

from pageferry.core.formats import PageFormat
from pageferry.core.gguf import GgufType
from pageferry.core.groups import parse_groups
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import load_config_of, resolve_model
from pageferry.core.plan import Chunk, Plan
from pageferry.core.pool import PageId
from pageferry.core.sampling import StopParams
from pageferry.core.sequence import NO_PAGE, Sequence, WorkItem
from pageferry.engine.batch import Batch, BatchBuilder
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.gpu_batch import HostBatch, Upload
from pageferry.engine.gpu_graphs import arrays_of, as_batch, batch_sizes, padding, table_widths
from pageferry.engine.gpu_load import DeviceLoader
from pageferry.engine.gpu_model import DeviceModel
from pageferry.engine.gpu_pages import DevicePages
from pageferry.engine.gpu_weights import load_grouped
from pageferry.engine.model import Model
from pageferry.engine.pages import PageTensors
from pageferry.engine.rope import inverse_frequencies
from pageferry.engine.runner import ForwardPass, TorchRunner
from pageferry.engine.tensors import TensorFiles
from pageferry.engine.weights import expected_shapes, load_weights

NUM_PAGES, MAX_POSITIONS = 24, 128
LLAMA = ModelConfig("tiny", "llama", 96, 48, 2, 4, 2, 8, 64, MAX_POSITIONS, 1e-5, 1e4, tied_embeddings=True)
MODELS = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, architecture="mistral", sliding_window=5),
    "qwen2": replace(LLAMA, architecture="qwen2", attention_bias=True, tied_embeddings=False),
    "qwen3": replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=16),
}
# Chunks (start, end) of three sequences in each step: prompts, one in two chunks and beside others' single tokens,
# then single tokens alone. Pages of 4 tokens fill within chunks, at their ends, and by single tokens.
STEPS = [
    [(0, 0, 7), (1, 0, 3)],
    [(0, 7, 8), (1, 3, 4), (2, 0, 9)],
    [(2, 9, 11), (0, 8, 9)],
    [(0, 9, 10), (1, 4, 5), (2, 11, 12)],
]


class RandomTensors:
    """`TensorFiles` of numbers that make every layer matter."""

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = expected_shapes(config)

    def load(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        shape = self.shapes[name]
        x = torch.randn(shape, generator=generator)
        return 1 + 0.1 * x if name.endswith("norm.weight") else x / shape[-1] ** 0.5

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


def batches(layout: CacheLayout) -> Iterator[Batch]:
    builder, targets = BatchBuilder(layout), sequences(layout)
    for step in STEPS:
        for i, start, end in step:
            free(layout, targets[i], start, end)
        batch = builder.build(tuple(Chunk(targets[i], start, end - start, samples=True) for i, start, end in step))
        yield replace(batch, sampled_rows=torch.arange(len(batch.token_ids), dtype=torch.int32))


def blanked(pages: PageTensors) -> None:
    pages.blank(Place(group, PageId(page)) for group in range(len(pages.pools)) for page in range(NUM_PAGES))


def logits(model: ForwardPass, pages: PageTensors) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.inference_mode():
        blanked(pages)
        return [model.forward(batch, pages).clone() for batch in batches(pages.layout)]


def models(config: ModelConfig, tensors: TensorFiles, device: str) -> tuple[Model, DeviceModel]:
    frequencies = inverse_frequencies(config)
    expected = Model(config, load_weights(config, tensors, torch.float32, progress=print), frequencies, MAX_POSITIONS)
    tested = DeviceLoader(config, tensors, "fp32", torch.device(device), 4).load(frequencies, MAX_POSITIONS, print)
    assert isinstance(tested, DeviceModel)
    return expected, tested


def pools(layout: CacheLayout, device: str) -> tuple[PageTensors, DevicePages]:
    counts = [NUM_PAGES] * len(layout.groups)
    return PageTensors(layout, counts, 3), DevicePages(layout, counts, 3, torch.device(device))


def check(config: ModelConfig, layout: CacheLayout, device: str, tolerance: float) -> None:
    expected, tested = models(config, RandomTensors(config), device)
    on_host, on_device = pools(layout, device)
    for result, reference in zip(logits(tested, on_device), logits(expected, on_host), strict=True):
        assert relative_error(result, reference) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_torchs(name: str, device: str) -> None:
    """fp32 sums in another order."""
    check(MODELS[name], layout_of(MODELS[name], "fp32"), device, 2e-5)


@pytest.mark.parametrize("page_format", ["int8", "k=int8:channel,v=int4:channel:asym"])
def test_quantised_pages_of_two_groups(page_format: str, device: str) -> None:
    """Where another order of sums turns a number to the next step, that step shows; few do."""
    layout = layout_of(LLAMA, page_format, "0=window:3,sinks:2;1=full")
    check(LLAMA, layout, device, 2e-2)


def test_a_files_own_groups(tiny_model: Path, tmp_path: Path, device: str) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(write_gguf(METADATA, gguf_tensors(tiny_model, GgufType.Q4_1)))
    config = replace(load_config_of(resolve_model(str(path))), max_positions=MAX_POSITIONS)
    tensors, frequencies = GgufTensors(path, config), inverse_frequencies(config)
    expected = Model(config, load_weights(config, tensors, torch.float32, progress=print), frequencies, MAX_POSITIONS)
    weights = load_grouped(config, tensors, torch.device(device), print)
    tested = DeviceModel(config, weights, torch.float32, frequencies, MAX_POSITIONS, 4)
    on_host, on_device = pools(layout_of(config, "fp32"), device)
    for result, reference in zip(logits(tested, on_device), logits(expected, on_host), strict=True):
        assert relative_error(result, reference) <= 2e-5
    tensors.close()


def test_the_runner_draws_the_same_tokens(device: str) -> None:
    layout = layout_of(LLAMA, "fp32")
    drawn = []
    for model, pages in zip(models(LLAMA, RandomTensors(LLAMA), device), pools(layout, device), strict=True):
        torch.manual_seed(1)
        target, runner = sequences(layout)[0], TorchRunner(model, pages, BatchBuilder(layout), 1)
        fresh = tuple(Place(0, page) for page in target.tables[0])
        runner.run(Plan((), fresh=fresh))
        assert runner.run(Plan((Chunk(target, 0, 5, samples=False),))).samples == ()
        drawn.append(runner.run(Plan((Chunk(target, 5, 2, samples=True),))).samples)
    assert drawn[0] == drawn[1]


def test_a_padded_batch_equals_one_that_is_not(device: str) -> None:
    """What a CUDA graph computes, without the graph."""
    layout = layout_of(LLAMA, "k=int8:channel,v=int8")
    _, model = models(LLAMA, RandomTensors(LLAMA), device)
    upload, (_, pages) = Upload(torch.device(device)), pools(layout, device)
    memories = [pool.memory for pool in (*pages.pools, *pages.tails)]
    torch.manual_seed(1)
    blanked(pages)
    with torch.inference_mode():
        *earlier, last = batches(layout)
        for batch in earlier:
            model.forward(batch, pages)
        before = [memory.clone() for memory in memories]
        expected = model.forward(last, pages).clone()
        written = [memory.clone() for memory in memories]
        for memory, kept in zip(memories, before, strict=True):
            memory.copy_(kept)
        arrays, unused = arrays_of(HostBatch(layout, last), 4, 16), padding(layout, 4, 16)
        assert [array.shape for array in arrays] == [array.shape for array in unused]
        result = model._compute(as_batch(upload(arrays), layout), pages)[:3].cpu()
    assert relative_error(result, expected) <= 2e-5  # another shape of matrix, another order of sums
    for memory, kept in zip(memories, written, strict=True):
        assert (memory != kept).float().mean() < 1e-2


def test_sizes_of_graphs() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert batch_sizes(70) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 70)
    assert table_widths(100, 16) == (16,)
    assert table_widths(8192, 16) == (64, 256, 512)
