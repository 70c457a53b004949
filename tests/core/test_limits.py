import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.limits import ModelLimits
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import WorkItem

LIMITS = ModelLimits(vocab_size=1000, max_model_tokens=2048)


def work(num_prompt: int = 1, *, max_tokens: int = 1, token_id: int = 5, **fields: tuple[int, ...]) -> WorkItem:
    stop = StopParams(max_tokens, stop_token_ids=frozenset(fields.pop("stop_ids", ())))
    return WorkItem("r", (token_id,) * num_prompt, SamplingParams(), stop, **fields)


@pytest.mark.field(
    "vllm-project/vllm#16445",
    "EleutherAI/lm-evaluation-harness#2880",
    "vllm-project/vllm#33418",
    "vllm-project/vllm#36789",
)
def test_what_just_fits_is_taken() -> None:
    LIMITS.check(work(2047))
    LIMITS.check(work(3, max_tokens=2045, token_id=999, stop_ids=(0, 999), output_ids=(1,)))


@pytest.mark.parametrize(
    ("item", "field", "counts"),
    [
        (work(2048), "prompt_ids", ("2048", "2049")),
        (work(5000, max_tokens=1), "prompt_ids", ("5000", "2048")),
        (work(8, max_tokens=2045), "max_tokens", ("8", "2045", "2053", "2048")),
        (work(token_id=1000), "prompt_ids", ("1000", "999")),
        (work(max_tokens=2, stop_ids=(1500,)), "stop_token_ids", ("1500", "999")),
        (work(max_tokens=2, output_ids=(1, 1000)), "output_ids", ("1000",)),
        (work(max_tokens=2, output_ids=(1, 2)), "output_ids", ("2",)),
    ],
)
@pytest.mark.field(
    "vllm-project/vllm#16445",
    "EleutherAI/lm-evaluation-harness#2880",
    "vllm-project/vllm#33418",
    "vllm-project/vllm#36789",
)
def test_what_does_not_fit_is_refused_with_the_field_and_the_numbers(
    item: WorkItem, field: str, counts: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        LIMITS.check(item)
    assert [violation.field for violation in caught.value.violations] == [field]
    for count in counts:
        assert count in caught.value.message
