"""The forward pass in Triton kernels against torch's, over chunks, single tokens and both in one batch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_steps import (
    LLAMA,
    MAX_POSITIONS,
    MODELS,
    RandomTensors,
    batches,
    blanked,
    layout_of,
    logits,
    pools,
    sequences,
)
from engines import relative_error
from gguf_writer import write_gguf
from tiny_gguf import METADATA, gguf_tensors

from pageferry.core.gguf import GgufType
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import load_config_of, resolve_model
from pageferry.core.plan import Chunk, Plan
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.gpu_batch import HostBatch, Upload
from pageferry.engine.gpu_graphs import arrays_of, as_batch, batch_sizes, padding, table_widths
from pageferry.engine.gpu_load import DeviceLoader
from pageferry.engine.gpu_model import DeviceModel
from pageferry.engine.gpu_weights import load_grouped
from pageferry.engine.model import Model
from pageferry.engine.rope import inverse_frequencies
from pageferry.engine.runner import TorchRunner
from pageferry.engine.tensors import TensorFiles
from pageferry.engine.weights import load_weights


def models(config: ModelConfig, tensors: TensorFiles, device: str) -> tuple[Model, DeviceModel]:
    frequencies = inverse_frequencies(config)
    expected = Model(config, load_weights(config, tensors, torch.float32, progress=print), frequencies, MAX_POSITIONS)
    tested = DeviceLoader(config, tensors, "fp32", torch.device(device), 4).load(frequencies, MAX_POSITIONS, print)
    assert isinstance(tested, DeviceModel)
    return expected, tested


def check(config: ModelConfig, layout: CacheLayout, device: str, tolerance: float) -> None:
    expected, tested = models(config, RandomTensors(config), device)
    on_host, on_device = pools(layout, device)
    for result, reference in zip(logits(tested, on_device), logits(expected, on_host), strict=True):
        assert relative_error(result, reference) <= tolerance
    is_timed = tested.device_s is not None and 0 < tested.device_s < 60
    assert is_timed == (tested.device.type == "cuda"), tested.device_s


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
