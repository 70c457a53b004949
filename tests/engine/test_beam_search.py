"""Beam search against transformers' own, of small random models in fp32: equal tokens, equal scores."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import load
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from pageferry.core.beam import BeamSearch, Hypothesis, num_candidates
from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.pools import PagePools
from pageferry.core.sampling import BeamParams, EarlyStopping, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, Sequence, WorkItem
from pageferry.engine.load import Engine

VOCAB_SIZE = 61
TOLERANCE = 1e-4  # of scores: sums of a few fp32 log-probabilities, in another order of additions
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EARLY = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """With weights so large that tokens differ in likelihood, and end ids that come up."""
    torch.manual_seed(3)
    logging.disable_progress_bar()
    kind, config = KINDS[request.param]
    made = kind(config(**SIZES, initializer_range=0.15, tie_word_embeddings=False)).eval()
    directory = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(directory)
    return made, directory


def cases() -> Iterable[tuple[int, float, EarlyStopping, tuple[int, ...], int, int, float]]:
    """Width, length penalty, early stopping, end ids, min_tokens, max_tokens, repetition penalty."""
    three = (5, 17, 40)
    for width in (1, 2, 3, 4, 8):
        for length_penalty in (0.0, 1.0, 2.0, -0.5):
            for early_stopping in EarlyStopping:
                yield width, length_penalty, early_stopping, three, 0, 12, 1.0
    yield from ((4, 1.0, early, (9,), 0, 20, 1.0) for early in EarlyStopping)
    yield 4, 1.0, EarlyStopping.HEURISTIC, (), 0, 10, 1.0
    yield 4, 1.0, EarlyStopping.HEURISTIC, tuple(range(0, 60, 3)), 6, 15, 1.0
    yield 3, 0.7, EarlyStopping.NEVER, tuple(range(0, 60, 2)), 3, 9, 1.0
    yield 4, 1.0, EarlyStopping.FIRST, three, 4, 12, 1.3
    yield 5, 1.0, EarlyStopping.HEURISTIC, three, 1, 1, 1.0


def work_of(
    prompt: tuple[int, ...],
    width: int,
    length_penalty: float,
    early: EarlyStopping,
    ends: tuple[int, ...],
    min_tokens: int,
    max_tokens: int,
    repetition_penalty: float,
) -> WorkItem:
    return WorkItem(
        "beams",
        prompt,
        SamplingParams(temperature=0, repetition_penalty=repetition_penalty),
        StopParams(max_tokens, min_tokens, frozenset(ends)),
        beam=BeamParams(width, length_penalty, early),
    )


def expected(model: PreTrainedModel, work: WorkItem) -> list[tuple[tuple[int, ...], float]]:
    """What transformers answers."""
    assert work.beam is not None
    config = GenerationConfig(
        num_beams=work.beam.width,
        num_return_sequences=work.beam.width,
        do_sample=False,
        length_penalty=work.beam.length_penalty,
        early_stopping=EARLY[work.beam.early_stopping],
        eos_token_id=sorted(work.stop.stop_token_ids) or None,
        pad_token_id=VOCAB_SIZE - 1,
        max_new_tokens=work.stop.max_tokens,
        min_new_tokens=work.stop.min_tokens or None,
        repetition_penalty=work.sampling.repetition_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    model.generation_config = GenerationConfig()
    with torch.inference_mode():
        made = model.generate(torch.tensor([work.prompt_ids]), generation_config=config)
    outputs = [_cut(row.tolist(), work) for row in made.sequences[:, len(work.prompt_ids) :]]
    return list(zip(outputs, made.sequences_scores.tolist(), strict=True))


def _cut(token_ids: list[int], work: WorkItem) -> tuple[int, ...]:
    """Without what fills a row behind its end."""
    for index, token_id in enumerate(token_ids):
        if token_id in work.stop.stop_token_ids and index + 1 >= work.stop.min_tokens:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)


def log_probs(model: PreTrainedModel, work: WorkItem) -> Callable[[tuple[int, ...]], list[tuple[int, float]]]:
    """The likeliest continuations of an output, by transformers' model."""

    def of(output: tuple[int, ...]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            row = model(torch.tensor([[*work.prompt_ids, *output]])).logits[0, -1].log_softmax(-1)
            if len(output) < work.stop.min_tokens:
                row[sorted(work.stop.stop_token_ids)] = -torch.inf
        values, ids = row.topk(min(VOCAB_SIZE, num_candidates(work)))
        return [pair for pair in zip(ids.tolist(), values.tolist(), strict=True) if pair[1] > -torch.inf]

    return of


def served(engine: Engine, *works: WorkItem, **config: Any) -> list[tuple[Hypothesis, ...]]:
    """What our engine answers, in pages, all at once."""
    pools = PagePools(engine.layout, engine.num_pages, engine.num_tails)
    scheduler = DecodeScheduler(SchedulerConfig(**{"headroom_pages": 0, **config}), pools, engine.layout)
    roots = [Sequence(work, float(index)) for index, work in enumerate(works)]
    for root in roots:
        scheduler.add(root, 0.0)
    ended: dict[Sequence, tuple[Hypothesis, ...]] = {}
    while (plan := scheduler.schedule(0.0)) is not None:
        output = scheduler.apply(plan, engine.runner.run(plan), 0.0)
        pools.check_integrity()
        for end in output.ended:
            assert not end.failure
            ended[end.sequence] = end.hypotheses
    assert pools.num_free + pools.num_cached == pools.num_pages
    return [ended[root] for root in roots]


def check(found: Iterable[Hypothesis], wanted: list[tuple[tuple[int, ...], float]]) -> None:
    found = list(found)
    assert [one.token_ids for one in found] == [token_ids for token_ids, _ in wanted]
    assert [one.score for one in found] == pytest.approx([score for _, score in wanted], abs=TOLERANCE)


PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8)


@pytest.mark.parametrize("case", [case for case in cases() if case[0] > 1 and case[-1] == 1], ids=str)
def test_the_choice_is_transformers_own(model: tuple[PreTrainedModel, Path], case: Any) -> None:
    work = work_of(PROMPT, *case)
    assert work.beam is not None
    search, likeliest = BeamSearch(work.beam, work.stop), log_probs(model[0], work)
    while not search.is_over:
        search.advance([likeliest(beam.token_ids) for beam in search.running])
    check(search.hypotheses, expected(model[0], work))


def test_the_engine_gives_what_transformers_gives(model: tuple[PreTrainedModel, Path]) -> None:
    engine = load(model[1], page_size=4, num_pages=400)
    works = [work_of(PROMPT, *case) for case in cases() if case[0] > 1]
    for work, hypotheses in zip(works, served(engine, *works, max_num_seqs=64, max_waiting=1000), strict=True):
        check(hypotheses, expected(model[0], work))


def test_preempted_beams_go_on_where_they_were(model: tuple[PreTrainedModel, Path]) -> None:
    engine = load(model[1], page_size=4, num_pages=24)
    case = (4, 1.0, EarlyStopping.NEVER, (5, 17, 40), 0, 16, 1.0)
    works = [work_of((variant, *PROMPT[1:]), *case) for variant in range(5)]
    for work, hypotheses in zip(works, served(engine, *works, max_num_seqs=16), strict=True):
        check(hypotheses, expected(model[0], work))


def test_hypotheses_say_why_they_ended(model: tuple[PreTrainedModel, Path]) -> None:
    engine = load(model[1], page_size=4)
    work = work_of(PROMPT, 4, 1.0, EarlyStopping.HEURISTIC, (5, 17, 40), 0, 12, 1.0)
    (hypotheses,) = served(engine, work, max_num_seqs=4)
    for one in hypotheses:
        is_stopped = one.token_ids[-1] in work.stop.stop_token_ids
        assert one.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert is_stopped or len(one.token_ids) == 12


@pytest.mark.parametrize(
    ("page_format", "cache_layers"),
    [("int8", ""), ("int8:channel", ""), ("fp32", "0=window:6,sinks:2;1=full"), ("int8:channel", "0=window:6;1=full")],
)
def test_pages_of_every_kind_are_forked(
    model: tuple[PreTrainedModel, Path], page_format: str, cache_layers: str
) -> None:
    """Against a search of which each continuation is computed from the prompt on, in pages of its own."""
    engine = load(model[1], page_format, page_size=4, num_pages=400, cache_layers=cache_layers)
    config = {"max_num_seqs": 16, "prefix_cache": False}
    work = work_of(PROMPT, 3, 1.0, EarlyStopping.NEVER, (), 0, 14, 1.0)
    assert work.beam is not None
    search = BeamSearch(work.beam, work.stop)
    while not search.is_over:
        prompts = [(*PROMPT, *beam.token_ids) for beam in search.running]
        firsts = [work_of(prompt, 3, 1.0, EarlyStopping.NEVER, (), 0, 1, 1.0) for prompt in prompts]
        found = served(engine, *firsts, **config)
        search.advance([[(one.token_ids[0], one.score) for one in likeliest] for likeliest in found])
    (hypotheses,) = served(engine, work, **config)
    check(hypotheses, [(one.token_ids, one.score) for one in search.hypotheses])
