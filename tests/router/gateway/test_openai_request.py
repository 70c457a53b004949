import json
import math

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.router.gateway.openai_request import parse_chat, parse_completion

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: object):
    return parse_chat(json.dumps(CHAT | fields).encode())


def test_every_field_reaches_the_request() -> None:
    parsed = chat(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        stop=["a", "b"],
        seed=2**64 - 1,
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        skip_special_tokens=False,
        priority=-3,
    )
    request = parsed.generate
    assert parsed.chat and parsed.stream and parsed.include_usage
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 4, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1, 0.5)
    assert (sampling.seed, sampling.logprobs) == (2**64 - 1, 3)
    stop = request.stop
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos, list(stop.stop_token_ids)) == (7, 2, True, [5])
    assert (request.model, list(request.stop_strings), request.priority) == ("m", ["a", "b"], -3)
    assert request.HasField("skip_special_tokens") and not request.skip_special_tokens


def test_what_is_absent_or_null_stays_absent() -> None:
    request = chat(temperature=None, stop=None, seed=None, n=1, logit_bias={}, tools=None, user=None).generate
    assert not request.sampling.ListFields() and not request.stop_strings
    assert not request.stop.HasField("max_tokens") and not request.HasField("skip_special_tokens")


def test_message_contents() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]).generate
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "ab")]


@pytest.mark.parametrize(("prompt", "kind"), [("x", "prompt"), (["x"], "prompt"), ([1, 2], "ids"), ([[1, 2]], "ids")])
def test_forms_of_a_prompt(prompt: object, kind: str) -> None:
    request = parse_completion(json.dumps({"prompt": prompt}).encode()).generate
    assert request.prompt == "x" if kind == "prompt" else list(request.token_ids.ids) == [1, 2]


def test_an_empty_list_of_ids_is_left_to_the_frontend() -> None:
    assert parse_completion(b'{"prompt": []}').generate.WhichOneof("input") == "token_ids"


@pytest.mark.field("vllm-project/vllm#8268")
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 2}, "n", "n is not supported"),
        ({"tools": [{}]}, "tools", "tools is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"cache_salt": "another tenant's"}, "cache_salt", "not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"xyz": None}, "xyz", "not a field of /v1/chat/completions"),
        ({"temperature": "hot"}, "temperature", "is a string, must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "out of range"),
        ({"max_tokens": -1}, "max_tokens", "is -1, must be a whole number from 0 to 4294967295"),
        ({"max_tokens": 1.5}, "max_tokens", "is 1.5, must be a whole number"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differs from max_tokens"),
        ({"top_k": 2**32}, "top_k", "is 4294967296"),
        ({"seed": -1}, "seed", "is -1, must be a whole number from 0 to 18446744073709551615"),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"stop": [1]}, "stop[0]", "is 1, must be a string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "is -1, must be a token id"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", "is true"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", "not supported"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be system, user or assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is null, must be a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name", "not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "parts"),
        ({"model": 3}, "model", "is 3, must be a string"),
        ({"model": []}, "model", "is a list, must be a string"),
        ({"stop_token_ids": False}, "stop_token_ids", "is false, must be a list"),
        ({"\ud800": 1}, "?", "? is not a field"),
        ({"stream": True, "stream_options": {"\udfff": 1}}, "stream_options.?", "not supported"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        chat(**fields)
    assert caught.value.violations[0].field == param
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "must be a string or a list of token ids"),
        (5, "must be a string or a list of token ids"),
        (["a", "b"], "holds 2 prompts"),
        ([1, -1], "prompt[1] is -1"),
        ([1, "a"], "prompts; send one"),
        ([1.0], "prompt[0] is 1.0"),
    ],
)
def test_a_bad_prompt_is_named(prompt: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_completion(json.dumps({"prompt": prompt}).encode())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "line 1 column 1"),
        (b'{"prompt": "a",}', "line 1 column 16"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"temperature": 1e999}', "finite"),
        (b'{"prompt": "\xff"}', "is not UTF-8 at byte 12"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b"[1]", "is a list, must be a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt is given twice"),
        (b'{"\\udfff": 1, "\\udfff": 2}', "? is given twice"),
    ],
)
def test_malformed_json_is_told_with_its_place(body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_completion(body)
    assert message in str(caught.value)
    assert not math.isnan(len(str(caught.value))) and len(str(caught.value)) < 200


def test_many_fields_before_one_that_comes_twice_take_no_longer_than_their_number_says() -> None:
    names = [f"a{number}" for number in range(200_000)]
    body = "{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}"
    with pytest.raises(InvalidArgumentError, match="a199999 is given twice"):
        parse_completion(body.encode())
