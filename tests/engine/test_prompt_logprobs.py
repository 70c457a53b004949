"""Log-probabilities of a prompt's tokens, against those of all logits at once."""

from pathlib import Path

import pytest
import torch
from engines import load, logits_of, runner_of, sequence as on_pages

from pageferry.core.config import SchedulerConfig
from pageferry.core.plan import SampledToken
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.scheduler import MAX_PROMPT_ROWS
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.engine.load import Engine

PROMPT = tuple(4 + index * index % 300 for index in range(150))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load(tiny_model)


def wanting(prompt: tuple[int, ...] = PROMPT, *, count: int = 3, output: tuple[int, ...] = ()) -> Sequence:
    sampling = SamplingParams(temperature=0, num_prompt_logprobs=count)
    return Sequence(WorkItem("x", prompt, sampling, StopParams(10), output), 0.0, prompt_logprobs=[])


def computed(engine: Engine, *sequences: Sequence) -> list[int]:
    """Computes them by a prefill worker's scheduler; the numbers of tokens of each step."""
    pools = PagePools(engine.layout, engine.num_pages, engine.num_tails)
    scheduler = PrefillScheduler(SchedulerConfig(batch_window_ms=0), pools, engine.layout)
    for sequence in sequences:
        scheduler.add(sequence, 0.0)
    steps = []
    while (plan := scheduler.schedule(0.0)) is not None:
        scheduler.apply(plan, engine.runner.run(plan), 0.0)
        steps.append(plan.num_tokens)
    pools.check_integrity()
    return steps


def expected(engine: Engine, prompt: tuple[int, ...]) -> torch.Tensor:
    target = on_pages(prompt, 0, engine.layout.num_pages(len(prompt)))
    return torch.log_softmax(logits_of(engine, target, [len(prompt)]), dim=-1)


def check(engine: Engine, sequence: Sequence, count: int = 3) -> None:
    prompt = sequence.work.prompt_ids
    table = expected(engine, prompt)
    assert sequence.prompt_logprobs is not None
    assert len(sequence.prompt_logprobs) == len(prompt) - 1
    for position, token in enumerate(sequence.prompt_logprobs):
        assert token.token_id == prompt[position + 1]
        assert token.logprob == pytest.approx(float(table[position, token.token_id]), abs=1e-4)
        values, ids = table[position].topk(count)
        assert [token_id for token_id, _ in token.top] == ids.tolist()
        assert [value for _, value in token.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_each_prompt_token_has_its_own_and_the_likeliest(engine: Engine) -> None:
    sequence = wanting()
    steps = computed(engine, sequence)
    assert max(steps) <= MAX_PROMPT_ROWS
    check(engine, sequence)
    plain = Sequence(WorkItem("y", PROMPT, SamplingParams(temperature=0), StopParams(10)), 0.0)
    computed(engine, plain)
    assert plain.token_ids == sequence.token_ids
    assert plain.prompt_logprobs is None


def test_what_is_cached_is_computed_all_the_same_and_mates_are_undisturbed(engine: Engine) -> None:
    first, second = wanting(), wanting(count=0)
    mate = Sequence(WorkItem("m", PROMPT[:40], SamplingParams(temperature=0, num_logprobs=1), StopParams(10)), 0.0)
    alone = Sequence(mate.work, 0.0)
    computed(engine, alone)
    computed(engine, first, mate, second)
    check(engine, first)
    assert second.num_cached == 0
    assert second.prompt_logprobs == [SampledToken(one.token_id, one.logprob) for one in first.prompt_logprobs or ()]
    assert mate.token_ids == alone.token_ids


def test_what_follows_the_prompt_is_not_reported(engine: Engine) -> None:
    sequence = wanting(output=PROMPT[:70])
    computed(engine, sequence)
    check(engine, sequence)


def test_a_prompt_of_one_token_has_none(engine: Engine) -> None:
    sequence = wanting((5,))
    computed(engine, sequence)
    assert sequence.prompt_logprobs == []
    assert sequence.num_output == 1


def test_it_is_computed_on_once_it_was_preempted_amid_the_prompt(engine: Engine) -> None:
    """Computed anew from its start, it reports only what was not reported."""
    sequence = wanting()
    assert sequence.prompt_logprobs is not None
    whole = wanting()
    computed(engine, whole)
    assert whole.prompt_logprobs is not None
    sequence.prompt_logprobs += whole.prompt_logprobs[:77]
    computed(engine, sequence)
    check(engine, sequence)
    assert runner_of(engine) is not None
