"""Properties of the draw: what can be drawn, how often, what it depends on, and what is reported with it."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence as ListLike
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.limits import ModelLimits
from pageferry.core.plan import NO_TOKEN, SampledToken, SampleFailure
from pageferry.core.sampling import Grammar, GrammarKind, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, Sequence, WorkItem
from pageferry.engine.adjust import SampleRow
from pageferry.engine.draw import uniform
from pageferry.engine.sampler import Sampler

VOCAB = 300
SAMPLER = Sampler()
NAN, INF = float("nan"), float("inf")


def sequence(
    *, prompt: Iterable[int] = (1,), output: Iterable[int] = (), stop: StopParams | None = None, **params: Any
) -> Sequence:
    choice = params.pop("choice", 0)
    settings, limits = SamplingParams(**({"seed": 7} | params)), stop or StopParams(max_tokens=1000)
    return Sequence(WorkItem("x", tuple(prompt), settings, limits, tuple(output), choice), 0.0)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, targets: ListLike[Sequence]) -> tuple[SampledToken | SampleFailure, ...]:
    return SAMPLER.sample(logits, [SampleRow(target) for target in targets])


def draw(logits: torch.Tensor, target: Sequence) -> SampledToken:
    (result,) = sample(logits[None].clone(), [target])
    assert isinstance(result, SampledToken)
    return result


def support(logits: torch.Tensor, **params: Any) -> set[int]:
    """Every token that 2,000 seeds draw."""
    repeated = logits.repeat(2000, 1)
    results = sample(repeated, [sequence(seed=seed, **params) for seed in range(2000)])
    return {result.token_id for result in results if isinstance(result, SampledToken)}


LADDER = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()


def test_greedy_takes_the_likeliest() -> None:
    logits = rows(8)
    results = sample(logits.clone(), [sequence(temperature=0)] * 8)
    assert results == tuple(SampledToken(int(row.argmax())) for row in logits)


def test_no_rows_no_results() -> None:
    assert sample(torch.empty(0, VOCAB), []) == ()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 0.99}, {0}),
        ({"top_k": 4, "top_p": 0.7}, {0, 1}),  # of the four kept, the first two have 0.74
        ({"top_p": 0.9, "min_p": 0.5}, {0, 1}),
        ({"temperature": 1e-300}, {0}),
        ({"temperature": 1e300, "top_k": 2}, {0, 1}),
        ({"temperature": 0.5, "top_p": 0.5}, {0}),  # squared, the first has 0.55
    ],
)
def test_only_what_is_kept_is_drawn(params: dict[str, Any], expected: set[int]) -> None:
    assert support(LADDER, **params) == expected


def test_of_equals_top_k_keeps_the_lowest_ids() -> None:
    assert support(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5]), top_k=2) == {1, 2}


def test_top_p_over_more_candidates_than_are_sorted_at_first() -> None:
    """Of 3,000 equal tokens half are kept."""
    kept = support(torch.zeros(3000), top_p=0.5)
    assert 1400 < max(kept) < 1500


def test_draws_follow_the_distribution() -> None:
    results = sample(LADDER.repeat(20_000, 1), [sequence(seed=seed) for seed in range(20_000)])
    counts = Counter(result.token_id for result in results if isinstance(result, SampledToken))
    for token_id, probability in enumerate((0.4, 0.3, 0.15, 0.1, 0.05)):
        assert abs(counts[token_id] / 20_000 - probability) < 4 * math.sqrt(probability / 20_000)


def test_temperature_sharpens_and_flattens() -> None:
    cold = sample(LADDER.repeat(5000, 1), [sequence(seed=seed, temperature=0.5) for seed in range(5000)])
    share = sum(result.token_id == 0 for result in cold if isinstance(result, SampledToken)) / 5000
    assert abs(share - 0.16 / (0.16 + 0.09 + 0.0225 + 0.01 + 0.0025)) < 0.03


@pytest.mark.field("vllm-project/vllm#17524", "vllm-project/vllm#5898", "vllm-project/vllm#51187")
def test_a_seeded_draw_depends_on_no_batch_mate_and_no_order() -> None:
    """Alone, and with 15 others in three orders: the same token and log-probabilities."""
    mates = rows(15, seed=1)
    params = {"temperature": 0.9, "top_p": 0.95, "num_logprobs": 5}
    own = rows(1, seed=2)[0]
    alone = draw(own, sequence(seed=42, **params))
    for order_seed in range(3):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(order_seed)).tolist()
        batch = torch.cat((own[None], mates))[order]
        targets = [sequence(seed=42 if i == 0 else 1000 + i, **params) for i in order]
        assert sample(batch, targets)[order.index(0)] == alone


TEMPERATURES = (0.0, 1e-300, 0.3, 1.0, 1.5, 1e300)
TOP_KS = (0, 1, 3, 40, 1500, 3000)
PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from(TEMPERATURES), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "top_k": st.sampled_from(TOP_KS),
        "top_p": st.sampled_from((0.01, 0.5, 0.95, 0.9999)),
        "min_p": st.sampled_from((0.01, 0.5)),
        "repetition_penalty": st.sampled_from((0.8, 1.3)),
        "frequency_penalty": st.sampled_from((-0.5, 0.7)),
        "num_logprobs": st.sampled_from((0, 1, 20)),
        "output": st.lists(st.integers(0, 2069), max_size=6),
        "stop": st.just(StopParams(max_tokens=1000, min_tokens=4, stop_token_ids=frozenset({0, 7}))),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=2, max_size=20), st.sampled_from((0.001, 1.0, 4.0)), st.integers(0, 2**32))
def test_no_batch_changes_a_rows_result(params: list[dict[str, Any]], scale: float, seed: int) -> None:
    """Each row alone, and among others of any kind, over a vocabulary that no block or group divides."""
    logits = torch.randn(len(params), 2070, generator=torch.Generator().manual_seed(seed)) * scale
    alone = [draw(row, sequence(**one)) for row, one in zip(logits, params, strict=True)]
    assert list(sample(logits.clone(), [sequence(**one) for one in params])) == alone
    backwards = sample(logits.flip(0), [sequence(**one) for one in reversed(params)])
    assert list(reversed(backwards)) == alone


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.sampled_from((0.001, 1.0, 4.0)), st.integers(0, 2**32))
def test_draws_are_of_what_sorting_all_tokens_keeps(params: dict[str, Any], scale: float, seed: int) -> None:
    """The whole vocabulary sorted and summed in float64: the token whose part of the distribution is drawn."""
    top_k, top_p, min_p = (params.get(name, off) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
    plain = {"temperature": params["temperature"] or 1.0, "seed": params["seed"]}
    logits = torch.randn(2070, generator=torch.Generator().manual_seed(seed)) * scale
    token_id = draw(logits, sequence(**plain, top_k=top_k, top_p=top_p, min_p=min_p)).token_id

    weights = ((logits - logits.max()).double() / plain["temperature"]).exp()
    order = logits.argsort(descending=True, stable=True)
    ranked = weights[order][: top_k or None]
    num_top_p = int((ranked.cumsum(0) < top_p * ranked.sum() * (1 - 1e-9)).sum()) + 1
    num_kept = min(num_top_p if top_p < 1 else len(ranked), int((ranked >= min_p).sum()))
    kept = order[:num_kept].sort().values
    cumulative = weights[kept].cumsum(0)
    target = float(cumulative[-1]) * uniform(plain["seed"], 0, 0)
    # Where fp32 sums decide, one token more or less may be kept.
    assert token_id in order[: num_kept + 1].tolist()
    slack = 1e-4 * float(cumulative[-1]) + 2 * float(weights[order[num_kept - 1]]) * (top_p < 1)
    before = float(weights[kept[kept < token_id]].sum())
    assert before - slack <= target <= before + float(weights[token_id]) + slack


def test_draws_differ_by_seed_position_and_choice() -> None:
    flat = torch.zeros(VOCAB)
    base = draw(flat, sequence())
    assert draw(flat, sequence()) == base
    assert draw(flat, sequence(seed=8)) != base
    assert draw(flat, sequence(output=[5])) != base
    assert draw(flat, sequence(choice=1)) != base
    # The position counts the output, forced or not; the prompt's length does not matter.
    assert draw(flat, sequence(prompt=range(50))) == base


def test_uniform_numbers_are_fixed_and_even() -> None:
    """Equal in every process and version: these are part of what a seed promises."""
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(2**64 - 1, 10, 3) == 0.9932324003847851
    values = [uniform(seed, position, 0) for seed in range(100) for position in range(100)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == len(values)
    deciles = Counter(int(value * 10) for value in values)
    assert all(abs(deciles[decile] - 1000) < 150 for decile in range(10))


@pytest.mark.field("vllm-project/vllm#14126", "EricLBuehler/mistral.rs#2051", "vllm-project/vllm#48231")
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0, "num_logprobs": 2}, {}])
def test_a_row_of_bad_numbers_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = rows(4)
    expected = sample(logits.clone(), [sequence(seed=row, **params) for row in range(4)])
    logits[2, 17] = bad
    results = sample(logits, [sequence(seed=row, output=[3] if row == 2 else [], **params) for row in range(4)])
    assert results[2] == SampleFailure("logits of position 1 are not finite numbers")
    assert [results[row] for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]


def test_logprobs_are_natural_before_temperature_and_likeliest_first() -> None:
    logits = rows(1)[0]
    result = draw(logits, sequence(temperature=0.3, num_logprobs=5))
    expected = torch.log_softmax(logits, dim=-1)
    assert result.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-6)
    values, ids = expected.sort(descending=True)
    assert [token_id for token_id, _ in result.top] == ids[:5].tolist()
    assert [value for _, value in result.top] == pytest.approx(values[:5].tolist(), abs=1e-6)
    assert draw(logits, sequence(num_logprobs=0)).top == ()
    assert draw(logits, sequence()).logprob is None


def test_logprobs_come_after_penalties() -> None:
    logits = rows(1)[0]
    result = draw(logits, sequence(output=[9], presence_penalty=1.5, num_logprobs=0, temperature=0))
    logits[9] -= 1.5
    assert result.logprob == pytest.approx(float(torch.log_softmax(logits, -1).max()), abs=1e-6)


def penalised(prompt: list[int], output: list[int], **params: Any) -> list[float]:
    """The logits 2, -2, 1, 0 of four tokens as penalties leave them, up to a constant, from the log-probabilities."""
    logits = torch.tensor([2.0, -2.0, 1.0, 0.0])
    target = sequence(prompt=prompt, output=output, temperature=0, num_logprobs=4, **params)
    reported = dict(draw(logits, target).top)
    return [round(reported[token_id] - reported[3], 4) for token_id in range(4)]


def test_penalties() -> None:
    assert penalised([0, 1], [2]) == [2, -2, 1, 0]
    # Repetition counts prompt and output: positive logits are divided, negative ones multiplied.
    assert penalised([0, 1], [2], repetition_penalty=2.0) == [1, -4, 0.5, 0]
    # Presence and frequency count the output alone.
    assert penalised([0, 1], [2, 2], presence_penalty=0.5) == [2, -2, 0.5, 0]
    assert penalised([0, 1], [2, 2], frequency_penalty=0.5) == [2, -2, 0, 0]
    assert penalised([2], [0, 0, 2], presence_penalty=0.5, frequency_penalty=0.25) == [1, -2, 0.25, 0]


@pytest.mark.parametrize("penalty", [1e-320, 1e-30, 1e300])
def test_no_penalty_overflows_what_can_be_drawn(penalty: float) -> None:
    logits = rows(1)[0]
    logits[5] = 0.0
    seen = range(0, VOCAB, 2) if penalty < 1 else range(VOCAB)
    for temperature in (0.0, 1.0):
        result = draw(logits, sequence(prompt=[5, *seen], repetition_penalty=penalty, temperature=temperature))
        assert result.token_id in seen


def test_stop_ids_are_out_of_reach_before_min_tokens() -> None:
    logits = torch.tensor([1.0, 9.0, 8.0, 2.0])
    stop = StopParams(max_tokens=10, min_tokens=2, stop_token_ids=frozenset({1, 2}))
    for output, expected in (([], 3), ([0], 3), ([0, 0], 1)):
        assert draw(logits, sequence(output=output, stop=stop, temperature=0)).token_id == expected
    assert all(draw(logits, sequence(stop=stop, seed=seed)).token_id in (0, 3) for seed in range(50))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"temperature": 0, "frequency_penalty": 1.0, "num_logprobs": 3},
        {"stop": StopParams(max_tokens=9, min_tokens=4, stop_token_ids=frozenset(range(0, VOCAB, 2)))},
    ],
)
def test_tokens_accepted_in_the_same_step_count_like_any(params: dict[str, Any]) -> None:
    logits = rows(6) / 3
    for row in range(6):
        extra = tuple((5, 9, 5, 11, 9)[:row])
        (result,) = SAMPLER.sample(logits[row][None].clone(), [SampleRow(sequence(output=[9], **params), extra)])
        assert result == draw(logits[row], sequence(output=[9, *extra], **params))


def test_when_every_token_is_a_stop_the_sequence_fails() -> None:
    stop = StopParams(max_tokens=10, min_tokens=2, stop_token_ids=frozenset({0, 1}))
    for temperature in (0, 1):
        results = sample(torch.zeros(1, 2), [sequence(stop=stop, temperature=temperature)])
        assert isinstance(results[0], SampleFailure)
        assert "min_tokens" in results[0].message


class Allows:
    """A constraint under which these ids may come; `problem` when they have run out."""

    def __init__(self, *allowed: set[int], vocab_size: int = VOCAB) -> None:
        self.problem, self.output_ids = "", list[int]()
        self._allowed, self._vocab_size = allowed, vocab_size

    def follow(self, output_ids: ListLike[int]) -> None:
        self.output_ids = list(output_ids)

    def allowed(self) -> bytes | None:
        if len(self.output_ids) >= len(self._allowed):
            self.problem = "it goes no further"
            return None
        bits = sum(1 << token_id for token_id in self._allowed[len(self.output_ids)])
        return bits.to_bytes(-(-self._vocab_size // 8) + 4, "little")


def constrained(constraint: Allows, **params: Any) -> Sequence:
    target = sequence(**params)
    target.constraint = constraint
    return target


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_only_what_a_grammar_allows_is_drawn_and_reported(params: dict[str, Any]) -> None:
    allowed = {3, 17, 299}
    for seed in range(40):
        result = draw(rows(1, seed)[0], constrained(Allows(allowed), seed=seed, num_logprobs=5, **params))
        assert result.token_id in allowed
        assert {token_id for token_id, _ in result.top} == allowed
        assert sum(math.exp(logprob) for _, logprob in result.top) == pytest.approx(1, abs=1e-5)


def test_a_grammar_follows_the_output_and_what_is_accepted_behind_it() -> None:
    constraint = Allows({1}, {2}, {3}, {4}, {5})
    target = constrained(constraint, output=[1, 2], temperature=0)
    assert draw(rows(1)[0], target).token_id == 3
    assert constraint.output_ids == [1, 2]
    target.append(3)
    (result,) = SAMPLER.sample(rows(1), [SampleRow(target, (4,))])
    assert result == SampledToken(5)
    assert constraint.output_ids == [1, 2, 3, 4]
    target.append(4)
    (result,) = SAMPLER.sample(rows(1), [SampleRow(target)])
    assert result == SampledToken(5)
    assert constraint.output_ids == [1, 2, 3, 4]


def test_a_grammar_that_breaks_off_fails_its_sequence_alone() -> None:
    logits = rows(3)
    targets = [sequence(), constrained(Allows()), sequence()]
    expected = sample(logits.clone(), [sequence()] * 3)
    assert sample(logits.clone(), targets) == (
        expected[0],
        SampleFailure("no token may follow at position 0: it goes no further"),
        expected[2],
    )


def test_a_grammar_and_bans_that_leave_nothing_fail_with_both_named() -> None:
    (result,) = sample(rows(1), [constrained(Allows({4}), banned=((4,),))])
    assert isinstance(result, SampleFailure)
    assert result.message.startswith(NO_TOKEN)
    assert "the grammar and what is banned" in result.message


def test_a_complete_answer_ends_before_min_tokens_where_nothing_else_may_follow() -> None:
    grammar, stop = Grammar(GrammarKind.REGEX, "a"), StopParams(10, min_tokens=5, stop_token_ids=frozenset({2}))
    target = constrained(Allows({1, 2}, {2}), grammar=grammar, stop=stop, temperature=0)
    for expected in (1, 2):
        target.append(draw(rows(1)[0], target).token_id)
        assert target.token_ids[-1] == expected
    assert target.finish_reason() is FinishReason.STOP


def test_bias_is_added_before_the_draw_and_what_is_reported() -> None:
    logits = rows(1)[0]
    result = draw(logits, sequence(logit_bias=((7, 100.0), (9, -100.0)), num_logprobs=2, temperature=0))
    assert result.token_id == 7
    logits[7] += 100
    logits[9] -= 100
    assert result.logprob == pytest.approx(float(torch.log_softmax(logits, -1)[7]), abs=1e-5)
    assert 9 not in support(LADDER.repeat(2), logit_bias=((9, -100.0),))


def test_the_last_token_of_a_banned_sequence_is_out_of_reach_behind_the_others() -> None:
    logits = torch.tensor([0.0, 1.0, 9.0, 8.0])
    banned = ((3,), (1, 2), (0, 1, 2, 1))
    for prompt, output, expected in (
        ([1], [], 2),  # the prompt's tokens are not generated ones
        ([1], [1], 1),
        ([0], [0, 1, 2], 2),
    ):
        target = sequence(prompt=prompt, output=output, banned=banned, temperature=0)
        assert draw(logits, target).token_id == expected
    (result,) = SAMPLER.sample(logits[None].clone(), [SampleRow(sequence(banned=banned, temperature=0), (1,))])
    assert result == SampledToken(1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": ((1500, -100.0),)}, "logit_bias is 1500, must be a token id from 0 to 999"),
        ({"banned": ((3,), (4, 1000))}, r"banned\[1\] is 1000, must be a token id from 0 to 999"),
    ],
)
def test_workers_refuse_ids_outside_the_vocabulary(params: dict[str, Any], message: str) -> None:
    limits, work = ModelLimits(1000, 2000), sequence(**params).work
    with pytest.raises(InvalidArgumentError, match=message):
        limits.check(work)
