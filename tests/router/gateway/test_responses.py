"""POST /v1/responses."""

import json
from typing import Any

import fake_frontend as fake
import httpx
import pytest
from fake_frontend import FakeFrontend, Script
from gateway import client_of, serving

from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.router.gateway.fields import Reading
from pageferry.router.gateway.responses_request import parse_responses
from pageferry.v1 import types_pb2 as types

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


async def ask(script: Script = fake.HELLO, **fields: Any) -> Any:
    async with client_of(FakeFrontend(script)) as client:
        response = await client.post("/v1/responses", json={"input": "hi"} | fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def parse(**fields: object):
    return parse_responses(json.dumps({"input": "hi"} | fields).encode(), Reading())


async def test_a_whole_answer() -> None:
    body = await ask(instructions="Be brief.", metadata={"a": "b"}, temperature=0)
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["status"] == "completed"
    (message,) = body["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert (body["metadata"], body["instructions"], body["temperature"]) == ({"a": "b"}, "Be brief.", 0)
    assert body["usage"]["input_tokens"] == 5 and body["usage"]["total_tokens"] == 7


async def test_a_streamed_answer_is_told_by_typed_events() -> None:
    events = await ask(stream=True)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_too_long_is_incomplete(stream: bool) -> None:
    script = (*fake.HELLO[:-1], fake.finished(types.FINISH_REASON_LENGTH))
    body = await ask(script, stream=stream)
    response = body[-1]["response"] if stream else body
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert not stream or body[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_items(stream: bool) -> None:
    script = (fake.started(), fake.delta("Let me see."), fake.delta(f"\n{CALL}"), fake.finished())
    body = await ask(script, tools=[TOOL], stream=stream)
    response = body[-1]["response"] if stream else body
    message, call = response["output"]
    assert message["content"][0]["text"] == "Let me see.\n"
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Oslo"}')
    if stream:
        added = [event["item"]["type"] for event in body if event["type"] == "response.output_item.added"]
        assert added == ["message", "function_call"]


async def test_an_answer_that_is_only_a_call_has_no_message() -> None:
    body = await ask((fake.started(), fake.delta("\n" + CALL), fake.finished()), tools=[TOOL])
    assert [item["type"] for item in body["output"]] == ["function_call"]


async def test_log_probabilities() -> None:
    script = (fake.started(), fake.delta("x", fake.token(0, 10, -0.5, [(10, -0.5)])), fake.finished())
    body = await ask(script, include=["message.output_text.logprobs"], top_logprobs=1)
    (entry,) = body["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"][0]["bytes"]) == ("<10>", -0.5, list(b"<10>"))


async def test_what_fails_in_mid_stream_is_told_and_breaks_the_connection_off() -> None:
    frontend = FakeFrontend((*fake.HELLO[:2], UnavailableError("the decode worker is gone", reason="GONE")))
    body = ""
    async with serving(frontend) as url, httpx.AsyncClient(base_url=url) as client:
        request = client.build_request("POST", "/v1/responses", json={"input": "hi", "stream": True})
        response = await client.send(request, stream=True)
        with pytest.raises(httpx.RemoteProtocolError):
            async for text in response.aiter_text():
                body += text
        await response.aclose()
    last = json.loads(body.split("data: ")[-1])
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "gone", "message": "the decode worker is gone"}
    assert "response.completed" not in body and "[DONE]" not in body


def test_items_become_messages() -> None:
    parsed = parse(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Rain.", "annotations": []}],
            },
            {"role": "user", "content": "Thanks"},
        ],
        tools=[TOOL],
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        max_output_tokens=7,
    )
    request = parsed.request
    told = [(message.role, message.content) for message in request.chat.messages]
    assert told == [
        *(("system", "Be brief."), ("user", "Weather?"), ("assistant", ""), ("tool", "rain")),
        *(("assistant", "Rain."), ("user", "Thanks")),
    ]
    assert json.loads(request.chat.messages[2].tool_calls_json)[0]["function"]["name"] == "weather"
    assert json.loads(request.chat.tools_json) == [
        {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
    ]
    assert request.sampling.grammar.json_schema == '{"type": "object"}' and request.stop.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"include": ["file_search_call.results"]}, "include", "may hold message.output_text.logprobs only"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", 'must have the type "function"'),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "must be message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "other parts"),
        ({"n": 2}, "n", "not a field of /v1/responses"),
        ({"max_tokens": 2}, "max_tokens", "not a field of /v1/responses"),
        ({"guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "text.format", "together with"),
    ],
)
def test_what_needs_more_is_refused(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(**fields)
    assert caught.value.violations[0].field == param and message in str(caught.value)


def test_what_asks_for_nothing_passes() -> None:
    reading = Reading()
    fields = {"input": "hi", "store": False, "truncation": "disabled", "tool_choice": "auto", "user": "u"}
    parse_responses(json.dumps(fields).encode(), reading)
    assert reading.ignored == ["user"]
