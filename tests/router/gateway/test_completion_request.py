import json

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.router.gateway.completion_request import MAX_PROMPTS, parse_completion
from pageferry.router.gateway.fields import Reading
from pageferry.router.gateway.parsed import Parsed
from pageferry.v1 import inference_pb2 as pb


def parse(prompt: object, **fields: object) -> Parsed:
    return parse_completion(json.dumps({"prompt": prompt} | fields).encode(), Reading())


def input_of(request: pb.GenerateRequest) -> str | list[int]:
    return request.prompt if request.WhichOneof("input") == "prompt" else list(request.token_ids.ids)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[1], "y"], [[1], "y"]),
        ([], [[]]),  # left to the frontend
    ],
)
def test_forms_of_a_prompt(prompt: object, inputs: list[object]) -> None:
    parsed = parse(prompt, seed=5)
    requests = [parsed.request_of(number) for number in range(parsed.num_requests)]
    assert [input_of(request) for request in requests] == inputs
    assert all(request.sampling.seed == 5 and request.stop.max_tokens == 16 for request in requests)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "is null, must be a string, a list of token ids"),
        (5, "is 5, must be a string, a list of token ids"),
        ([1, -1], "prompt[1] is -1"),
        ([1, "a"], "prompt[0] is 1, must be a string"),
        ([1.0], "prompt[0] is 1.0"),
        ([[1], [2.5]], "prompt[1][0] is 2.5"),
        (["a", {}], "prompt[1] is an object"),
        (["a"] * (MAX_PROMPTS + 1), f"holds {MAX_PROMPTS + 1} prompts, at most {MAX_PROMPTS}"),
        ("\ud800", "half of a surrogate pair"),
    ],
)
def test_a_bad_prompt_is_named(prompt: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(prompt)
    assert message in str(caught.value)


def test_the_log_probabilities_of_an_echoed_prompt_are_asked_for() -> None:
    parsed = parse("a", echo=True, logprobs=2)
    request = parsed.request
    assert (request.echo, request.sampling.logprobs, request.sampling.prompt_logprobs) == (True, 2, 2)
    assert parsed.echo_logprobs and not parsed.prompt_logprobs
    assert not parse("a", echo=True).request.sampling.HasField("prompt_logprobs")


def test_fields_of_chats_are_not_fields_of_completions() -> None:
    for name in ("messages", "max_completion_tokens", "top_logprobs"):
        with pytest.raises(InvalidArgumentError, match=f"{name} is not a field of /v1/completions"):
            parse("a", **{name: 1})
    with pytest.raises(InvalidArgumentError, match="suffix is not supported"):
        parse("a", suffix="b")
    assert parse("a", suffix="").request.prompt == "a"
