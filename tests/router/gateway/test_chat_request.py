import json

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.router.gateway.chat_request import parse_chat
from pageferry.router.gateway.fields import Reading
from pageferry.router.gateway.parsed import Parsed, Streaming
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bergen"}'}}


def parse(**fields: object) -> Parsed:
    return parse_chat(json.dumps(CHAT | fields).encode(), Reading())


def chat(**fields: object) -> pb.GenerateRequest:
    return parse(**fields).request


def test_every_field_reaches_the_request() -> None:
    parsed = parse(
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
        profile="quality",
        n=3,
        best_of=4,
        bad_words=["rust"],
        logit_bias={"7": -100, "4294967295": 0.5},
        max_repeats=5,
        prompt_logprobs=2,
    )
    request = parsed.request
    assert parsed.streaming == Streaming(usage=True) and parsed.prompt_logprobs and not parsed.calls
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 4, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1, 0.5)
    assert (sampling.seed, sampling.logprobs) == (2**64 - 1, 3)
    stop = request.stop
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos, list(stop.stop_token_ids)) == (7, 2, True, [5])
    assert (request.model, list(request.stop_strings), request.priority) == ("m", ["a", "b"], -3)
    assert request.HasField("skip_special_tokens") and not request.skip_special_tokens
    assert (request.n, request.best_of, request.profile, list(request.bad_words)) == (3, 4, "quality", ["rust"])
    assert dict(sampling.logit_bias) == {7: -100, 4294967295: 0.5}
    assert (stop.max_repeats, sampling.prompt_logprobs, parsed.num_choices) == (5, 2, 3)


def test_what_is_absent_or_null_stays_absent() -> None:
    request = chat(temperature=None, stop=None, seed=None, n=None, logit_bias={}, tools=None, user=None)
    assert not request.sampling.ListFields() and not request.stop_strings and request.n == 0
    assert not request.stop.HasField("max_tokens") and not request.HasField("skip_special_tokens")


def test_message_contents() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "ab")]


@pytest.mark.field("vllm-project/vllm#8268")
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"cache_salt": "another tenant's"}, "cache_salt", "not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"xyz": 1}, "xyz", "not a field of /v1/chat/completions"),
        ({"temperature": "hot"}, "temperature", "is a string, must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "out of range"),
        ({"max_tokens": -1}, "max_tokens", "is -1, must be a whole number from 0 to 4294967295"),
        ({"max_tokens": 1.5}, "max_tokens", "is 1.5, must be a whole number"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differs from max_tokens"),
        ({"top_k": 2**32}, "top_k", "is 4294967296"),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"stop": [1]}, "stop[0]", "is 1, must be a string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "is -1, must be a token id"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", "is true"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is null, must be a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "parts"),
        ({"model": 3}, "model", "is 3, must be a string"),
        ({"model": []}, "model", "is a list, must be a string"),
        ({"stop_token_ids": False}, "stop_token_ids", "is false, must be a list"),
        ({"\ud800": 1}, "?", "? is not a field"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", "not a field of stream_options"),
        ({"stream": True, "stream_options": {"\udfff": 1}}, "stream_options.?", "not a field"),
        ({"seed": -(2**63) - 1}, "seed", "is -9223372036854775809, must be a whole number from"),
        ({"n": 0}, "n", "is 0, must be a whole number from 1"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "must have token ids"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "must have token ids"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias", "must have token ids"),
        ({"logit_bias": [1]}, "logit_bias", "is a list, must be an object"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.'1'", "must be a number"),
        ({"length_penalty": 2}, "length_penalty", "needs use_beam_search"),
        ({"early_stopping": True}, "early_stopping", "needs use_beam_search"),
        ({"use_beam_search": True, "early_stopping": 1.5}, "early_stopping", 'true, false or "never"'),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "together with guided_regex"),
        ({"guided_choice": []}, "guided_choice", "at least one text"),
        ({"guided_json": {}, "strict": True}, "strict", "not a field of /v1/chat/completions"),
        ({"structured_outputs": {"json": {}, "name": "x"}}, "structured_outputs.name", "not a field"),
        ({"structured_outputs": {"whitespace": 1}}, "structured_outputs.whitespace", "not a field"),
        ({"tools": [{}]}, "tools[0]", 'must have the type "function"'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "must be a string"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "must be auto or none"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be auto or none"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "must be true"),
        ({"tools": [TOOL | {"function": {"name": "\ud800"}}]}, "tools[0].function.name", "surrogate"),
        ({"tools": [TOOL | {"function": {"name": "x", "y": "\ud800"}}]}, "tools", "surrogate"),
        ({"continue_final_message": True}, "continue_final_message", "needs the last message to be the assistant's"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "must be false where continue_final_message",
        ),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "must be system, developer, user"),
        (
            {"messages": [{"role": "user", "content": "x", "weight": 1}]},
            "messages[0].weight",
            "not a field of a message",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "must be"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        chat(**fields)
    assert caught.value.violations[0].field == param
    assert message in str(caught.value)


def test_a_conversation_with_tools() -> None:
    messages = [
        {"role": "user", "content": "Weather?", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    parsed = parse(messages=messages, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    request = parsed.request
    user, assistant, tool = request.chat.messages
    assert parsed.calls and json.loads(request.chat.tools_json) == [TOOL]
    assert (user.name, assistant.content, json.loads(assistant.tool_calls_json)) == ("bob", "", [CALL])
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "c1", "rain")


def test_tools_that_may_not_be_called_are_not_told() -> None:
    parsed = parse(tools=[TOOL], tool_choice="none")
    assert not parsed.calls and not parsed.request.chat.tools_json


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, types.Grammar(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"a": "é"}},
                }
            },
            types.Grammar(json_schema='{"a": "é"}'),
        ),
        ({"guided_json": {"type": "object"}}, types.Grammar(json_schema='{"type": "object"}')),
        ({"guided_json": '{"type":"object"}'}, types.Grammar(json_schema='{"type":"object"}')),
        ({"guided_regex": "[0-9]+"}, types.Grammar(regex="[0-9]+")),
        ({"guided_grammar": "start: A"}, types.Grammar(lark="start: A")),
        ({"guided_choice": ["yes", "no"]}, types.Grammar(choices=types.Choices(texts=["yes", "no"]))),
        ({"structured_outputs": {"regex": "a", "json": None}}, types.Grammar(regex="a")),
        ({"structured_outputs": {"json_object": True}}, types.Grammar(json_object=True)),
    ],
)
def test_what_an_answer_must_match(fields: dict[str, object], grammar: types.Grammar | None) -> None:
    sampling = chat(**fields).sampling
    assert (sampling.grammar if sampling.HasField("grammar") else None) == grammar


def test_beam_search() -> None:
    request = chat(use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping="never")
    assert (request.n, request.best_of, request.beam.width, request.beam.length_penalty) == (2, 0, 4, 0.5)
    assert request.beam.early_stopping == types.EARLY_STOPPING_NEVER
    assert chat(use_beam_search=True, early_stopping=True).beam.early_stopping == types.EARLY_STOPPING_FIRST
    assert not chat(length_penalty=1, early_stopping=False, use_beam_search=False).HasField("beam")


def test_what_the_template_is_told() -> None:
    assert not chat(add_generation_prompt=True).chat.template_variables_json
    variables = chat(add_generation_prompt=False, chat_template_kwargs={"a": 1}).chat.template_variables_json
    assert json.loads(variables) == {"a": 1, "add_generation_prompt": False}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Hel"}]
    assert chat(messages=messages, continue_final_message=True, add_generation_prompt=False).chat.continue_last


def test_a_seed_below_zero_and_top_k_of_minus_one_are_as_elsewhere() -> None:
    sampling = chat(seed=-1, top_k=-1).sampling
    assert (sampling.seed, sampling.top_k) == (2**64 - 1, 0)


def test_what_changes_no_answer_is_noted_and_so_is_what_is_unknown_where_it_may_be() -> None:
    reading = Reading(refuse_unknown=False)
    fields = {"user": "u", "metadata": {"a": "b"}, "xyz": 1, "null": None, "stream": True, "stream_options": {"abc": 1}}
    parse_chat(json.dumps(CHAT | fields).encode(), reading)
    assert reading.ignored == ["stream_options.abc", "user", "metadata", "xyz"]
    with pytest.raises(InvalidArgumentError, match="audio is not supported"):
        parse_chat(json.dumps(CHAT | {"audio": {}}).encode(), Reading(refuse_unknown=False))
