"""The whole step in compiled kernels on a file's own groups: close to dequantised weights, and the same bits always."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import FORMATS, kernels, needs_library
from engines import Generation, content, load, logits_of, places, runner_of, sequence, windowed_logits_of
from gguf_writer import write_gguf
from tiny_gguf import METADATA, gguf_tensors
from tiny_model import VOCAB_SIZE, TinyShape, write_tiny_model

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.gguf import GgufType
from pageferry.core.plan import Chunk, Plan, SampleFailure
from pageferry.engine.load import Engine, load_engine
from pageferry.engine.model import Model
from pageferry.engine.native import NativeModel
from pageferry.kernels.cpu_library import Isa, available_isas
from pageferry.kernels.linear import Linear
from pageferry.kernels.quantised_linear import quantise_groups_ref

# Root mean square: an activation near halfway between two int8 is rounded either way, which moves others later on.
LIMIT = 0.025
TOKENS = [(index * 37) % VOCAB_SIZE for index in range(300)]


def write(path: Path, directory: Path, kind: GgufType, architecture: str) -> Path:
    """Of the small random model; qwen2 adds biases, qwen3 norms of heads, and "mixed" has two types in a projection."""
    name = "llama" if architecture == "mixed" else architecture
    metadata = {key.replace("llama", name): name if value == "llama" else value for key, value in METADATA.items()}
    tensors = gguf_tensors(directory, kind, permute=name == "llama")
    random = np.random.default_rng(1)
    for layer in range(4):
        prefix = f"blk.{layer}.attn_"
        if architecture == "qwen2":
            for part, rows in (("q", 64), ("k", 32), ("v", 32)):
                tensors[f"{prefix}{part}.bias"] = (GgufType.F32, random.standard_normal(rows))
        if architecture == "qwen3":
            for part in ("q_norm", "k_norm"):
                tensors[f"{prefix}{part}.weight"] = (GgufType.F32, 1 + 0.3 * random.standard_normal(16))
        if architecture == "mixed":
            tensors[f"{prefix}v.weight"] = (GgufType.Q8_0, tensors[f"{prefix}v.weight"][1])
    path.write_bytes(write_gguf(metadata, tensors))
    return path


@pytest.fixture
def tiny_gguf(tiny_model: Path, tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", tiny_model, GgufType.Q4_1, "mixed")


def native(path: Path | str, page_format: str = "int8", **settings: Any) -> Engine:
    engine = load(path, page_format, compute_dtype="auto", **settings)
    assert isinstance(runner_of(engine).model, NativeModel)
    return engine


@needs_library
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mixed"])
@pytest.mark.parametrize("kind", [GgufType.Q4_0, GgufType.Q4_1, GgufType.Q8_0], ids=lambda kind: kind.name)
def test_logits_are_torchs_with_activations_in_groups(
    architecture: str, kind: GgufType, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model, kind, architecture)
    target = sequence(TOKENS, 0, 19)
    result = logits_of(native(path, "fp32"), target, [300])
    multiply = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: multiply(self, quantise_groups_ref(x).float()))
    expected = logits_of(load(path, kernels="torch"), target, [300])
    assert (result - expected).norm() < LIMIT * expected.norm()


@needs_library
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize(("cache_layers", "page_size"), [("", 5), ("0,2=window:40,sinks:5;1,3=full", 16)])
def test_every_format_and_group_gives_torchs_logits_in_any_chunks(
    tiny_gguf: Path, page_format: PageFormat, cache_layers: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only pages that are needed are held, and all else is poison; torch attends over the same pages."""
    settings = {"page_size": page_size, "cache_layers": cache_layers}
    engine, tokens = native(tiny_gguf, str(page_format), **settings), TOKENS[:110]
    result = windowed_logits_of(engine, tokens, [110])
    assert torch.equal(windowed_logits_of(engine, tokens, [7, 16, 48, 79, *range(80, 111)]), result)
    multiply = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: multiply(self, quantise_groups_ref(x).float()))
    expected = windowed_logits_of(load(tiny_gguf, str(page_format), kernels="torch", **settings), tokens, [110])
    assert (result - expected).norm() < LIMIT * expected.norm()


@pytest.mark.field("vllm-project/vllm#17524", "vllm-project/vllm#5898", "vllm-project/vllm#51187")
@needs_library
@pytest.mark.parametrize("page_format", ["fp32", "bf16", "int8", "int4:channel:asym", "k=int8:channel,v=int4"])
def test_bits_do_not_depend_on_chunks_company_or_threads(tiny_gguf: Path, page_format: str) -> None:
    engine, other = native(tiny_gguf, page_format), native(tiny_gguf, page_format, threads=2)
    target = sequence(TOKENS, 3, 19)
    whole = logits_of(engine, target, [300])
    pages = content(engine, target)
    chunkings: list[Iterable[int]] = [[300], [1, 48, 49, 50, 180, 300], range(1, 301)]
    for ends in chunkings:
        assert torch.equal(logits_of(other, target, ends), whole)
        assert content(other, target) == pages
    mates = [sequence(TOKENS[start:], 22 + 10 * start, 10) for start in (1, 2)]
    together = (
        Chunk(mates[0], 0, 77, samples=True),
        Chunk(target, 299, 1, samples=True),
        Chunk(mates[1], 0, 3, samples=True),
    )
    runner = runner_of(engine)
    logits = runner.model.forward(runner.builder.build(together), runner.pages)
    assert torch.equal(logits[1], whole[299])


@needs_library
def test_a_sequence_whose_pages_went_bad_fails_alone(tiny_gguf: Path) -> None:
    engine = native(tiny_gguf)
    targets = [sequence(TOKENS[: 20 + row], 4 * row, 4) for row in range(3)]
    chunks = tuple(Chunk(target, 0, len(target.token_ids), samples=True) for target in targets)
    before = engine.runner.run(
        Plan(chunks, fresh=tuple(place for target in targets for place in places(target)))
    ).samples
    scales = engine.pages.layers[1].keys.scales
    assert scales is not None
    scales[targets[1].tables[0][0]] = float("nan")
    again = tuple(Chunk(target, len(target.token_ids) - 1, 1, samples=True) for target in targets)
    after = engine.runner.run(Plan(again)).samples
    assert isinstance(after[1], SampleFailure)
    assert (after[0], after[2]) == (before[0], before[2])


@needs_library
@pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.name)
def test_the_likeliest_tokens_are_found_on_the_way(isa: Isa, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native(tiny_gguf)
    runner, model = runner_of(engine), runner_of(engine).model
    assert isinstance(model, NativeModel)
    monkeypatch.setattr(model, "_kernels", kernels(isa))
    targets = [sequence(TOKENS[i:], 2 * i, 2) for i in range(8)]
    batch = runner.builder.build(tuple(Chunk(target, 0, 20, samples=True) for target in targets))
    logits = model.forward(batch, engine.pages)
    assert model.likeliest is not None
    assert model.likeliest.tolist() == logits.argmax(dim=-1).tolist()
    model._kept[0].norm.fill_(float("nan"))
    assert model.forward(batch, engine.pages).isnan().all()
    assert model.likeliest.tolist() == [-1] * 8


@needs_library
def test_a_steady_state_allocates_nothing(tiny_gguf: Path) -> None:
    engine = native(tiny_gguf)
    runner = runner_of(engine)
    batch = runner.builder.build((Chunk(sequence(TOKENS, 0, 19), 0, 100, samples=True),))
    first = runner.model.forward(batch, engine.pages).data_ptr()
    assert all(runner.model.forward(batch, engine.pages).data_ptr() == first for _ in range(3))


def test_settings_choose_the_path(tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    assert isinstance(runner_of(load(tiny_gguf, kernels="torch", compute_dtype="auto")).model, Model)
    assert isinstance(runner_of(load(tiny_gguf, compute_dtype="fp32")).model, Model)
    assert isinstance(runner_of(load(tiny_model, compute_dtype="auto")).model, Model)
    half = write(tmp_path / "half.gguf", tiny_model, GgufType.F16, "llama")
    assert isinstance(runner_of(load(half, compute_dtype="auto")).model, Model)


@needs_library
def test_portable_code_runs_only_where_it_is_asked_for(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portable = kernels(Isa.PORTABLE)
    monkeypatch.setattr("pageferry.engine.loaders.load_kernels", lambda _: portable)
    assert isinstance(runner_of(load(tiny_gguf, compute_dtype="auto")).model, Model)
    assert isinstance(runner_of(load(tiny_gguf, compute_dtype="auto", kernels="cpu")).model, NativeModel)


def test_kernels_that_can_not_be_had_are_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = write_tiny_model(tmp_path / "narrow", TinyShape(num_attention_heads=8, head_dim=8))
    with pytest.raises(InvalidArgumentError, match=r"kernels is 'cpu', can't be cpu: .* heads have 8 numbers"):
        load_engine(_config(narrow), SchedulerConfig(), progress=lambda _: None)
    monkeypatch.setattr("pageferry.engine.loaders.load_kernels", lambda _: None)
    with pytest.raises(InvalidArgumentError, match="without a C\\+\\+ compiler"):
        load_engine(_config(tiny_model), SchedulerConfig(), progress=lambda _: None)
    assert isinstance(runner_of(load(tiny_model)).model, Model)


def _config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), num_pages=40, threads=1, kernels="cpu")


@needs_library
@pytest.mark.field("huggingface/transformers#22312", "mistralai/mistral-inference#150")
def test_generations_equal_alone_and_together(tiny_gguf: Path) -> None:
    engine = native(tiny_gguf)

    def generate(rows: list[int]) -> list[list[int]]:
        generation = Generation(engine, [sequence(TOKENS[row : row + 9 * row + 5], 6 * row, 6) for row in rows])
        generation.prefill()
        generation.decode(12)
        return [target.output_ids for target in generation.sequences]

    assert generate([0, 1, 2, 3]) == [generate([row])[0] for row in range(4)]
