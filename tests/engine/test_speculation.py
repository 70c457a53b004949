"""The same tokens with drafts and without, and draws that follow the model's distribution."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from compiled import needs_library
from decoding import Decoding, requested
from engines import load
from gguf_writer import write_gguf
from scheduling import layout
from tiny_gguf import METADATA, gguf_tensors
from tiny_model import TinyShape, write_tiny_model

from pageferry.core.config import SchedulerConfig
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf import GgufType
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import Sequence
from pageferry.engine.batch import Batch, BatchBuilder
from pageferry.engine.load import Engine
from pageferry.engine.runner import TorchRunner

GREEDY = SamplingParams(temperature=0)
WINDOWS = "0=window:20,sinks:3;1-2=full;3=window:7"
SOURCES = ("lookup", "layers:2", "draft")
NUM_PROMPTS = 50


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(write_gguf(METADATA, gguf_tensors(tiny_model, GgufType.Q4_1)))
    return path


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> str:
    """The draft model is the target in finer groups."""
    if request.param != "draft":
        return str(request.param)
    path = tmp_path / "draft.gguf"
    path.write_bytes(write_gguf(METADATA, gguf_tensors(tiny_model, GgufType.Q8_0)))
    return f"draft:{path}"


def prompts(count: int) -> list[list[int]]:
    """Some repeat themselves, some repeat a part, some nothing; lengths are around those of pages."""
    random = Random(5)
    made = []
    for number in range(count):
        once = [random.randrange(4, 300) for _ in range(random.choice((3, 7, 14, 15, 16, 17, 30)))]
        made.append((once * 3)[: random.randrange(len(once), 3 * len(once) + 1)] if number % 3 else once)
    return made


def works(count: int, samplings: Iterable[SamplingParams] = (GREEDY,), max_tokens: int = 40) -> list[Sequence]:
    kinds = list(samplings)
    return [
        requested(ids, max_tokens, kinds[number % len(kinds)], number=number, stop=(7, 250))
        for number, ids in enumerate(prompts(count))
    ]


def compare(engine: Engine, source: str, samplings: Iterable[SamplingParams], count: int, **settings: Any) -> float:
    """Assert equal tokens with and without drafts; what share of them needed no step."""
    kinds = list(samplings)
    expected = Decoding(engine, **settings).outputs(works(count, kinds))
    drafted = works(count, kinds)
    assert Decoding(engine, source, **settings).outputs(drafted) == expected
    assert sum(one.num_accepted for one in drafted) <= sum(one.num_drafted for one in drafted)
    return sum(one.num_accepted for one in drafted) / sum(map(len, expected))


@needs_library
@pytest.mark.parametrize(
    ("page_format", "cache_layers"),
    [("int8", ""), ("int8", WINDOWS), ("fp32", WINDOWS), ("int4:channel", ""), ("int4:channel", WINDOWS)],
)
def test_greedy_tokens_are_the_same_over_fifty_prompts(
    tiny_gguf: Path, page_format: str, cache_layers: str, source: str
) -> None:
    engine = load(
        tiny_gguf, page_format, compute_dtype="auto", num_pages=200, cache_layers=cache_layers, speculation=source
    )
    assert compare(engine, source, [GREEDY], NUM_PROMPTS) > 0.1


@needs_library
@pytest.mark.parametrize("page_format", ["int8", "int8:channel"])
def test_tokens_are_the_same_under_preemption(tiny_gguf: Path, page_format: str, source: str) -> None:
    engine = load(tiny_gguf, page_format, compute_dtype="auto", num_pages=200, speculation=source)
    expected = Decoding(engine).outputs(works(30))
    drafted = works(30)
    limits = SchedulerConfig(max_num_seqs=12, headroom_pages=0)
    assert Decoding(engine, source, scheduler_config=limits, num_pages=14).outputs(drafted) == expected
    assert sum(one.num_preemptions for one in drafted) > 2
    assert sum(one.num_accepted for one in drafted) > 20


@needs_library
def test_drawn_tokens_are_the_same(tiny_gguf: Path, source: str) -> None:
    """Whatever goes into a draw: temperature, filters, penalties, and tokens that must not come yet."""
    engine = load(tiny_gguf, "int8", compute_dtype="auto", num_pages=200, speculation=source)
    samplings = (
        SamplingParams(temperature=0.3, seed=1),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=2),
        SamplingParams(temperature=0.4, repetition_penalty=1.1, frequency_penalty=0.2, seed=3),
        SamplingParams(temperature=0, presence_penalty=0.3, num_logprobs=2),
    )
    assert compare(engine, source, samplings, 32) > 0


@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize("page_format", [pytest.param("fp32", marks=pytest.mark.slow), "int8:channel"])
def test_torch_computes_drafts_too(tiny_model: Path, page_format: str, source: str) -> None:
    """By torch's products last bits differ between shapes, and tokens only where two are as likely: not here."""
    engine = load(tiny_model, page_format, kernels="torch", num_pages=200, cache_layers=WINDOWS, speculation=source)
    assert compare(engine, source, [GREEDY], 20) > 0.1


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_max_tokens_are_never_exceeded(tiny_model: Path, num_drafts: int) -> None:
    engine = load(tiny_model, num_pages=200)
    for max_tokens in (1, 2, 5, 9):
        targets = [requested([5, 6, 7, 8] * 5, max_tokens, GREEDY)]
        (output,) = Decoding(engine, "lookup", num_drafts).outputs(targets)
        assert len(output) == max_tokens


@needs_library
def test_drafts_that_cannot_be_made_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    def refused(speculation: str, **settings: Any) -> str:
        with pytest.raises(InvalidArgumentError) as error:
            load(tiny_gguf, compute_dtype="auto", speculation=speculation, **settings)
        return str(error.value)

    def written(name: str, **metadata: object) -> Path:
        path = tmp_path / name
        smaller = write_tiny_model(tmp_path / name[:-5], TinyShape())
        path.write_bytes(write_gguf({**METADATA, **metadata}, gguf_tensors(smaller, GgufType.Q8_0)))
        return path

    assert "must be fewer layers than the model's 4" in refused("layers:4")
    same = written("same.gguf")
    assert "needs layers that keep all tokens" in refused(f"draft:{same}", cache_layers="0-3=window:20")
    other = written("other.gguf", **{"tokenizer.ggml.tokens": ["a", "b"]})
    assert "must name a model with the same tokenizer as tiny" in refused(f"draft:{other}")
    assert "49152 tokens, must have those of the target" in refused("draft:smollm2")


@needs_library
def test_a_draft_models_memory_is_in_the_sum(tiny_gguf: Path) -> None:
    reports = [
        load(tiny_gguf, compute_dtype="auto", speculation=speculation).memory_report
        for speculation in ("off", "lookup", f"draft:{tiny_gguf}")
    ]
    off, lookup, draft = (report.get("drafts", 0) for report in reports)
    assert off == 0 < lookup
    assert draft - lookup > reports[0]["weights"] + reports[0]["pages"]
    assert all(sum(r.values()) - r["available"] == 2 * r["total"] for r in reports)


TABLE = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])


@dataclass
class Markov:
    """A model whose next token depends on the last one alone."""

    likeliest = None
    device_s = None

    def forward(self, batch: Batch, pages: object) -> torch.Tensor:
        return TABLE.log()[batch.token_ids[batch.sampled_rows.long()].long()].clone()


class NoPages:
    def blank(self, places: object) -> None: ...
    def copy(self, source: object, target: object) -> None: ...


@dataclass
class MarkovEngine:
    layout = layout()
    num_pages = (400,)
    num_tails = 0
    runner = TorchRunner(Markov(), NoPages(), BatchBuilder(layout, for_torch=False), 1)  # type: ignore[arg-type]


def test_draws_with_drafts_follow_the_distribution() -> None:
    """Three tokens behind a text that lookup always finds a match for: each of 64 outcomes as often as it should."""
    count, prompt = 6000, [0, 1, 2, 0, 1, 2, 0]
    engine: Any = MarkovEngine()
    sequences = [requested(prompt, 3, SamplingParams(seed=seed), number=seed) for seed in range(count)]
    limits = SchedulerConfig(max_num_seqs=100, max_waiting=count, local_chunk_tokens=2000)
    decoding = Decoding(engine, "lookup", scheduler_config=limits)
    counts = Counter(map(tuple, decoding.outputs(sequences)))
    assert sum(one.num_accepted for one in sequences) > count / 10
    statistic, freedom = 0.0, -1
    for outcome in product(range(4), repeat=3):
        before = (prompt[-1], *outcome)
        expected = count * math.prod(float(TABLE[a, b]) for a, b in zip(before, outcome, strict=False))
        statistic += (counts[outcome] - expected) ** 2 / expected
        freedom += 1
    assert statistic < freedom + 3 * math.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", ["lookup", "layers:8"])
def test_greedy_tokens_of_the_real_model_are_the_same_over_fifty_prompts(source: str) -> None:
    engine = load("smollm2", "int8", compute_dtype="auto", num_pages=600, speculation=source)
    random = Random(3)
    starts = [[random.randrange(1000, 40_000) for _ in range(12)] * 2 for _ in range(NUM_PROMPTS)]
    expected = Decoding(engine).outputs([requested(ids, 60, GREEDY, number=i) for i, ids in enumerate(starts)])
    drafted = [requested(ids, 60, GREEDY, number=i) for i, ids in enumerate(starts)]
    assert Decoding(engine, source).outputs(drafted) == expected
    least = 200 if source == "lookup" else 1  # nobody trained the first layers to draft
    assert sum(one.num_accepted for one in drafted) >= least
