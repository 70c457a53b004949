"""Steps of the runner: mixed batches, failures that stay alone, equal pages in every run, warm-up."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import GREEDY, Generation, content, load, places, runner_of, sequence
from page_pools import layout, spoil
from safetensors.torch import load_file, save_file

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.plan import Chunk, Plan, SampleFailure, Samples, StepResult
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import Sequence
from pageferry.engine.batch import Batch, BatchBuilder
from pageferry.engine.load import Engine, load_engine
from pageferry.engine.model import Model
from pageferry.engine.pages import PageTensors
from pageferry.engine.runner import TorchRunner
from pageferry.kernels.segment import Segment

LENGTHS = (5, 16, 17, 40, 3)
BAD_FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4:asym", "int8:channel", "k=int4:channel:asym,v=bf16")


def four_pages(row: int, sampling: SamplingParams = GREEDY) -> Sequence:
    """A prompt of its own length and ids, on pages of its own."""
    ids = [4 + (row * 31 + index * 7) % 300 for index in range(LENGTHS[row])]
    return sequence(ids, 4 * row, 4, sampling=sampling)


def generate(
    engine: Engine, rows: list[int], num_steps: int = 12, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    generation = Generation(engine, [four_pages(row, sampling) for row in rows])
    generation.prefill()
    generation.decode(num_steps)
    return [target.output_ids for target in generation.sequences]


@pytest.mark.parametrize("page_format", ["fp32", "int8", "k=fp8_e4m3,v=int4:asym", "k=int8:channel,v=int4:asym"])
@pytest.mark.field("huggingface/transformers#22312", "mistralai/mistral-inference#150")
def test_batch_mates_change_nothing(tiny_model: Path, page_format: str) -> None:
    engine = load(tiny_model, page_format)
    alone = [generate(engine, [row])[0] for row in range(5)]
    assert generate(engine, [0, 1, 2, 3, 4]) == alone
    assert generate(engine, [3, 1, 4]) == [alone[3], alone[1], alone[4]]
    seeded = SamplingParams(seed=42)
    assert generate(engine, [2, 0, 3], sampling=seeded)[0] == generate(engine, [2], sampling=seeded)[0]


@pytest.mark.field("vllm-project/vllm#17524", "vllm-project/vllm#5898", "vllm-project/vllm#51187")
def test_a_seeded_sequence_is_the_same_among_others_in_any_order_and_in_any_chunks(tiny_model: Path) -> None:
    engine = load(tiny_model, num_pages=80)

    def output(order: list[int], chunk_tokens: int) -> list[int]:
        targets = [
            sequence(
                [4 + (row * 31 + index * 7) % 300 for index in range(40 if row == 0 else 3 + 2 * row)],
                5 * row,
                5,
                sampling=SamplingParams(temperature=1.0, seed=42 if row == 0 else 1000 + row),
            )
            for row in order
        ]
        generation = Generation(engine, targets)
        generation.prefill(chunk_tokens=chunk_tokens)
        generation.decode(12)
        return targets[order.index(0)].output_ids

    alone = output([0], 1000)
    assert len(alone) == 13
    for step, start in ((1, 0), (3, 5), (7, 11)):
        assert output([(start + step * index) % 16 for index in range(16)], 1000) == alone
    for chunk_tokens in (1, 7, 16, 33):
        assert output([0], chunk_tokens) == alone


def test_prefill_and_decode_share_a_batch(tiny_model: Path) -> None:
    """Chunks and single tokens together, in any order, sample what they do apart, in the plan's order."""
    engine = load(tiny_model)
    expected = generate(engine, [0, 3], num_steps=1)
    decoding, prompt = four_pages(0), four_pages(3)
    first = engine.runner.run(Plan((Chunk(decoding, 0, 5, samples=True),), fresh=places(decoding)))
    decoding.append(_token(first.samples[0]))
    start = Plan((Chunk(prompt, 0, 30, samples=False),), fresh=places(prompt))
    assert engine.runner.run(start).samples == ()
    both = engine.runner.run(Plan((Chunk(prompt, 30, 10, samples=True), Chunk(decoding, 5, 1, samples=True))))
    assert [_token(sample) for sample in both.samples] == [expected[1][0], expected[0][1]]
    assert both.forward_s > 0


def test_a_copied_page_continues_like_its_source(tiny_model: Path) -> None:
    engine = load(tiny_model)
    expected = generate(engine, [2], num_steps=3)[0]
    target = four_pages(2)
    engine.runner.run(Plan((Chunk(target, 0, 17, samples=True),), fresh=places(target)))
    target.append(expected[0])
    source, new = Place(0, target.tables[0][1]), Place(0, PageId(60))
    target.tables[0][1] = new.page
    result = engine.runner.run(Plan((Chunk(target, 17, 1, samples=True),), copies=((source, new),)))
    assert _token(result.samples[0]) == expected[1]


@pytest.mark.parametrize("page_format", BAD_FORMATS)
def test_a_sequence_whose_pages_went_bad_fails_alone(tiny_model: Path, page_format: str) -> None:
    engine = load(tiny_model, page_format)
    good = generate(engine, [0, 1, 2, 3], num_steps=5)
    generation = Generation(engine, [four_pages(row) for row in range(4)])
    generation.prefill()
    generation.decode(2)
    spoil(engine.pages.layers[1], generation.sequences[1].tables[0][0])
    generation.decode(1)
    assert isinstance(generation.results[-1][1], SampleFailure)
    del generation.sequences[1]
    generation.decode(2)
    assert [target.output_ids for target in generation.sequences] == [good[row] for row in (0, 2, 3)]


@dataclass
class FailingModel:
    """Gives one row of logits that are not numbers at a given step."""

    model: Model
    bad_step: int
    bad_row: int
    step: int = 0
    likeliest: None = None
    device_s: None = None

    def forward(self, batch: Batch, pages: PageTensors) -> torch.Tensor:
        logits = self.model.forward(batch, pages)
        self.step += 1
        if self.step == self.bad_step:
            logits[self.bad_row] = float("nan")
        return logits

    def first_layers(self, num_layers: int) -> Model:
        return self.model.first_layers(num_layers)


@pytest.mark.field("vllm-project/vllm#14126", "EricLBuehler/mistral.rs#2051", "vllm-project/vllm#48231")
def test_bad_logits_at_one_step_fail_one_of_four(tiny_model: Path) -> None:
    engine = load(tiny_model)
    good = generate(engine, [0, 1, 2, 3], num_steps=4)
    whole = runner_of(engine)
    generation = Generation(engine, [four_pages(row) for row in range(4)])
    generation.prefill()
    failing = FailingModel(whole.model, 5, 2)
    runner = TorchRunner(failing, whole.pages, whole.builder, 1)  # type: ignore[arg-type]
    result = StepResult(())
    for _ in range(5):
        chunks = tuple(Chunk(s, len(s.token_ids) - 1, 1, samples=True) for s in generation.sequences)
        result = runner.run(Plan(chunks))
        for target, sample in zip(generation.sequences, result.samples, strict=True):
            target.append(0 if isinstance(sample, SampleFailure) else _token(sample))
    assert [isinstance(sample, SampleFailure) for sample in result.samples] == [False, False, True, False]
    assert [target.output_ids[:5] for target in generation.sequences] == good


def digest(model: str, page_format: str, compute_dtype: str = "fp32") -> str:
    """Of the pages after a prompt of 200 tokens in chunks of 48, and ten more tokens."""
    engine = load(model, page_format, compute_dtype=compute_dtype)
    generation = Generation(engine, [sequence([(7 * index) % 300 for index in range(200)], 3, 14)])
    generation.prefill(chunk_tokens=48)
    generation.decode(10)
    return hashlib.sha256(content(engine, generation.sequences[0])).hexdigest()


@pytest.mark.parametrize(
    ("page_format", "compute_dtype"),
    [("fp32", "fp32"), ("int8", "fp32"), ("int8", "bf16"), ("int4:channel", "fp32"), ("int4:channel", "bf16")],
)
def test_pages_are_equal_in_every_run(tiny_model: Path, page_format: str, compute_dtype: str) -> None:
    assert len({digest(str(tiny_model), page_format, compute_dtype) for _ in range(2)}) == 1


def test_pages_are_equal_in_every_process(tiny_model: Path) -> None:
    paths = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2] / "src")]
    program = (
        f"import sys, runpy; sys.path[:0] = {paths!r}; module = runpy.run_path({__file__!r}); "
        f"print(module['digest']({str(tiny_model)!r}, 'int8'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(str(tiny_model), "int8")


def test_blank_slots_stay_blank(tiny_model: Path) -> None:
    """What a page holds beyond its tokens is zero with scale 1, also where the pool was dirty."""
    engine = load(tiny_model, "k=int8,v=int4:asym")
    engine.pages.pools[0].memory.fill_(0xFF)
    generate(engine, [0], num_steps=0)
    for layer in engine.pages.layers:
        for side in (layer.keys, layer.values):
            assert side.scales is not None
            assert not side.payload[0, :, 5:].any()
            assert (side.scales[0, :, 5:] == 1).all()
            assert side.payload[0, :, :5].any()
        assert layer.values.zeros is not None and not layer.values.zeros[0, :, 5:].any()


def test_an_empty_plan_does_nothing(tiny_model: Path) -> None:
    assert load(tiny_model).runner.run(Plan(())).samples == ()


@pytest.mark.parametrize("cache_layers", ["", "0-2=window:5,sinks:1;3=full"])
@pytest.mark.parametrize("page_format", ["int8", "int8:channel"])
@pytest.mark.parametrize("num_pages", [2, 64])
def test_warm_up_fits_every_pool(tiny_model: Path, num_pages: int, page_format: str, cache_layers: str) -> None:
    config = EngineConfig(
        str(tiny_model), page_format, cache_layers, num_pages=num_pages, threads=1, max_model_tokens=20
    )
    engine = load_engine(config, SchedulerConfig(max_num_seqs=4), progress=lambda _: None)
    engine.warm_up()
    assert engine.model_config.max_positions == 20


def test_grouping_pads_little_and_covers_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pageferry.engine.segments.MAX_GATHERED", 64 * 16 * 8)
    lengths = [1, 1000, 17, 900, 16, 500, 31, 480]
    sequences = [sequence([0] * length, 0, -(-length // 16)) for length in lengths]
    chunks = tuple(Chunk(target, len(target.token_ids) - 1, 1, samples=True) for target in sequences)
    segments = segments_of(layout(PageFormat.parse("fp32"), heads=1, dim=4), chunks)
    assert sorted(row for segment in segments for row in segment.rows.tolist()) == list(range(8))
    for segment in segments:
        members = [-(-lengths[row] // 16) for row in segment.rows.tolist()]
        width = len(segment.pages) // segment.num_seqs
        assert width == max(members) <= 2 * min(members)
        assert segment.num_seqs == 1 or width * segment.num_seqs <= 64


def test_a_window_reads_only_the_pages_within_it() -> None:
    target = sequence([0] * 1000, 100, 63)
    window = layout(PageFormat.parse("fp32"), groups=(CacheGroup((0,), 20, sinks=3),))
    (segment,) = segments_of(window, (Chunk(target, 999, 1, samples=True),))
    assert segment.pages.tolist() == [100, 161, 162]
    visible = (segment.mask[0, 0] == 0).nonzero().flatten()
    assert visible.tolist() == [0, 1, 2, *range(980 - 960, 1000 - 960)]


def segments_of(of: CacheLayout, chunks: tuple[Chunk, ...]) -> list[Segment]:
    (in_group,) = BatchBuilder(of).build(chunks).places
    return in_group.segments


def _token(samples: Samples) -> int:
    assert not isinstance(samples, SampleFailure)
    (sample,) = samples
    return sample.token_id


@pytest.mark.field("vllm-project/vllm#14126", "EricLBuehler/mistral.rs#2051", "vllm-project/vllm#48231")
@pytest.mark.parametrize("page_format", BAD_FORMATS)
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_activations_that_are_not_numbers_fail_their_sequence_alone(
    tiny_model: Path, tmp_path: Path, page_format: str, compute_dtype: str
) -> None:
    """One token's embedding is NaN: whoever has it fails at once, in a batch or by itself, the others go on."""
    directory = Path(shutil.copytree(tiny_model, tmp_path / "nan"))
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][319] = float("nan")
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    engine = load(directory, page_format, compute_dtype=compute_dtype)
    prompts = ([5, 6, 7], [5, 319, 7], [9, 8])
    targets = [sequence(ids, 4 * row, 4) for row, ids in enumerate(prompts)]
    chunks = tuple(Chunk(target, 0, len(target.token_ids), samples=True) for target in targets)
    fresh = tuple(place for target in targets for place in places(target))
    samples = engine.runner.run(Plan(chunks, fresh=fresh)).samples
    assert [isinstance(sample, SampleFailure) for sample in samples] == [False, True, False]
    for row in (0, 2):
        assert engine.runner.run(Plan((chunks[row],), fresh=places(targets[row]))).samples == (samples[row],)
