import math

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.sampling import MAX_LOGPROBS, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, Sequence, WorkItem

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, INF]),
        ("top_k", [-1, 2**32]),
        ("top_p", [0.0, -0.5, 1.01, NAN]),
        ("min_p", [-0.1, 1.0, NAN]),
        ("repetition_penalty", [0.0, -1.0, NAN, INF]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("seed", [-1, 2**64]),
        ("num_logprobs", [-1, MAX_LOGPROBS + 1]),
    ],
)
def test_a_bad_value_is_refused_by_its_name(field: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        name = field.removeprefix("num_")
        assert caught.value.message.startswith(f"{name} is {value!r}, must be ")
        assert [violation.field for violation in caught.value.violations] == [name]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0.0, 1e-6, 100.0]),
        ("top_k", [0, 1]),
        ("top_p", [1e-9, 1.0]),
        ("min_p", [0.0, 0.999]),
        ("repetition_penalty", [1e-3, 5.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("seed", [0, 2**64 - 1]),
        ("num_logprobs", [None, 0, MAX_LOGPROBS]),
    ],
)
def test_a_value_at_its_limit_is_taken(field: str, values: list[float]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_greedy_is_temperature_0_alone() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-9, top_k=1).is_greedy


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        (SamplingParams(), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
    ],
)
def test_penalties_are_on_when_one_is(params: SamplingParams, has_penalties: bool) -> None:
    assert params.has_penalties == has_penalties


def test_token_limits_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="max_tokens is 0, must be at least 1"):
        StopParams(max_tokens=0)
    for min_tokens in (-1, 6):
        with pytest.raises(InvalidArgumentError, match=f"min_tokens is {min_tokens}, must be from 0 to max_tokens, 5"):
            StopParams(max_tokens=5, min_tokens=min_tokens)


@pytest.mark.field("vllm-project/vllm#21987", "vllm-project/vllm#4589", "vllm-project/vllm#5849")
@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([7], None),
        ([7, 106], None),  # before min_tokens no stop id counts
        ([7, 106, 8], None),
        ([7, 106, 106], FinishReason.STOP),
        ([7, 8, 1], FinishReason.STOP),
        ([7, 8, 9, 10], FinishReason.LENGTH),
        ([7, 8, 9, 106], FinishReason.STOP),
    ],
)
def test_a_generation_ends_by_stop_id_after_min_tokens_or_by_length(
    output: list[int], reason: FinishReason | None
) -> None:
    stop = StopParams(max_tokens=4, min_tokens=3, stop_token_ids=frozenset({1, 106}))
    sequence = Sequence(WorkItem("request", (5, 106), SamplingParams(), stop), arrival=0.0)
    assert sequence.finish_reason() is None
    for token_id in output:
        sequence.append(token_id)
    assert sequence.finish_reason() is reason


def test_a_prompt_that_ends_in_a_stop_id_is_no_end() -> None:
    stop = StopParams(max_tokens=4, stop_token_ids=frozenset({1}))
    assert Sequence(WorkItem("request", (5, 1), SamplingParams(), stop), arrival=0.0).finish_reason() is None


def test_forced_output_counts_as_output() -> None:
    work = WorkItem("request", (5, 6), SamplingParams(), StopParams(max_tokens=3), output_ids=(7, 8))
    sequence = Sequence(work, arrival=0.0)
    assert (sequence.num_prompt, sequence.num_output, sequence.output_ids) == (2, 2, [7, 8])
    assert (sequence.token_ids, sequence.num_remaining) == ([5, 6, 7, 8], 4)
    sequence.append(9)
    assert sequence.finish_reason() is FinishReason.LENGTH


def test_a_request_has_no_more_stop_ids_than_each_step_can_look_at() -> None:
    assert len(StopParams(1, stop_token_ids=frozenset(range(1024))).stop_token_ids) == 1024
    with pytest.raises(InvalidArgumentError, match=r"^stop_token_ids is '1025 token ids', must be at most 1024"):
        StopParams(1, stop_token_ids=frozenset(range(1025)))
