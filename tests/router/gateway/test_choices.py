"""Several choices, several prompts, echoed prompts and calls of tools."""

import asyncio
import json
from typing import Any

import fake_frontend as fake
import pytest
from fake_frontend import FakeFrontend, Script
from gateway import client_of

from pageferry.core.errors import UnavailableError
from pageferry.router.gateway.runs import MAX_SIDE_BY_SIDE
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
LENGTH, REPETITION = types.FINISH_REASON_LENGTH, types.FINISH_REASON_REPETITION
# The second of two answers ends first.
TWO = (
    fake.started(),
    fake.delta("a", fake.token(0, 10)),
    fake.delta("x", fake.token(0, 11), choice=1),
    fake.choice_finished(1, LENGTH),
    fake.delta("b", fake.token(1, 12)),
    fake.choice_finished(0, matched_stop="END"),
    fake.finished(matched_stop="END"),
)


async def ask(script: Script, path: str = "completions", **fields: Any) -> Any:
    """The body of a whole answer, or the chunks of a streamed one."""
    fields = {"prompt": "a"} | fields if path == "completions" else CHAT | fields
    async with client_of(FakeFrontend(script)) as client:
        response = await client.post(f"/v1/{path}", json=fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    *events, done = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def choices_of(chunks: list[Any], index: int) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


async def test_two_answers() -> None:
    first, second = (await ask(TWO, n=2))["choices"]
    assert (first["index"], first["text"], first["finish_reason"], first["stop_reason"]) == (0, "ab", "stop", "END")
    assert (second["index"], second["text"], second["finish_reason"]) == (1, "x", "length")
    assert "stop_reason" not in second


@pytest.mark.field("vllm-project/vllm#11898", "ggml-org/llama.cpp#18700")
async def test_two_streamed_answers_each_open_and_end_once() -> None:
    chunks = await ask(TWO, "chat/completions", n=2, stream=True)
    for index, text, reason in ((0, "ab", "stop"), (1, "x", "length")):
        choices = choices_of(chunks, index)
        assert [choice["delta"].get("role") for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), reason]


async def test_a_score_and_a_repetition_are_told() -> None:
    script = (
        fake.started(),
        fake.delta("aa"),
        fake.choice_finished(0, REPETITION, score=-0.25),
        fake.finished(REPETITION),
    )
    (choice,) = (await ask(script, best_of=2))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["score"]) == ("length", "repetition", -0.25)


def by_prompt(request: pb.GenerateRequest) -> list[fake.Step]:
    text = request.prompt.upper()
    return [
        fake.started(request.request_id),
        fake.delta(text, fake.token(0, 10)),
        fake.delta(text, fake.token(0, 10), choice=1),
        fake.choice_finished(1),
        fake.finished(),
    ]


async def test_choices_are_counted_across_prompts_and_usage_is_summed() -> None:
    frontend = FakeFrontend(by_prompt)
    async with client_of(frontend) as client:
        fields = {"prompt": ["a", "b", "c"], "n": 2}
        response = await client.post("/v1/completions", json=fields, headers={"x-request-id": "r"})
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/v1/completions", json=fields)
    body = response.json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate("AABBCC"))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (15, 6)
    assert {request.request_id for request in frontend.requests[:3]} == {"r", "r-1", "r-2"}
    chunks = [json.loads(block.removeprefix("data: ")) for block in streamed.text.split("\n\n")[:-2]]
    for index, text in enumerate("AABBCC"):
        assert "".join(choice["text"] for choice in choices_of(chunks, index)) == text
        assert choices_of(chunks, index)[-1]["finish_reason"] == "stop"
    assert [chunk["usage"] is None for chunk in chunks] == [*[True] * (len(chunks) - 1), False]
    assert chunks[-1]["usage"]["total_tokens"] == 21


async def test_a_prompt_that_fails_fails_all() -> None:
    def script(request: pb.GenerateRequest) -> list[fake.Step]:
        return [UnavailableError("gone", retry_after_ms=10)] if request.prompt == "b" else [asyncio.Event()]

    frontend = FakeFrontend(script)
    async with client_of(frontend) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "gone")
    assert frontend.num_closed == len(frontend.requests) == 3


async def test_prompts_run_side_by_side_but_not_all_at_once() -> None:
    gate = asyncio.Event()
    frontend = FakeFrontend(lambda request: [fake.started(), gate, fake.finished()])
    async with client_of(frontend) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a"] * 20}))
        await asyncio.wait_for(frontend.waiting.wait(), 60)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(frontend.requests) == MAX_SIDE_BY_SIDE
        gate.set()
        assert len((await asking).json()["choices"]) == 20


def echoed(*tokens: types.GeneratedToken) -> pb.GenerateResponse:
    event = fake.delta("Hi<10><11>", *tokens)
    for token_id, logprob in ((10, -1.0), (11, float("-inf"))):
        entry = event.delta.prompt_logprobs.tokens.add()
        entry.sampled.token_id, entry.sampled.logprob = token_id, logprob
        entry.top.add(token_id=12, logprob=-0.5)
    return event


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_log_probabilities_too(stream: bool) -> None:
    script = (fake.started(), echoed(fake.token(0, 13, -2.0)), fake.delta("<13>"), fake.finished())
    body = await ask(script, echo=True, logprobs=1, stream=stream)
    choice = body[0]["choices"][0] if stream else body["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Hi", "<10>", "<11>", "<13>"], "what came in other deltas is no part of the prompt"
    assert logprobs["token_logprobs"] == [None, -1.0, None, -2.0]
    assert logprobs["top_logprobs"] == [None, {"<12>": -0.5}, {"<12>": -0.5}, {}]
    assert logprobs["text_offset"] == [0, 2, 6, 10]
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("stream", [False, True])
async def test_further_answers_to_an_echoed_prompt_share_its_log_probabilities(stream: bool) -> None:
    first, second = (
        fake.delta("Hi<20>", fake.token(0, 20, -2.0)),
        fake.delta("Hi<21>", fake.token(0, 21, -3.0), choice=1),
    )
    first.delta.prompt_logprobs.SetInParent()  # of a prompt of one token
    script = (fake.started(), first, second, fake.choice_finished(1), fake.finished())
    body = await ask(script, echo=True, logprobs=0, n=2, stream=stream)
    for index, token, logprob in ((0, "<20>", -2.0), (1, "<21>", -3.0)):
        logprobs = choices_of(body if stream else [body], index)[0]["logprobs"]
        assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["Hi", token], [None, logprob])
        assert logprobs["text_offset"] == [0, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_log_probabilities_of_a_prompt_in_their_own_field(path: str, stream: bool) -> None:
    body = await ask((fake.started(), echoed(), fake.finished()), path, prompt_logprobs=1, stream=stream)
    choice = next(c for c in choices_of(body, 0) if "prompt_logprobs" in c) if stream else body["choices"][0]
    assert choice["logprobs"] is None
    top = {"logprob": -0.5, "decoded_token": "<12>"}
    assert choice["prompt_logprobs"] == [
        None,
        {"10": {"logprob": -1.0, "decoded_token": "<10>"}, "12": top},
        {"11": {"logprob": None, "decoded_token": "<11>"}, "12": top},
    ]


async def test_usage_so_far_is_in_every_chunk_where_it_is_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await ask(fake.HELLO, stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2, 2]
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in chunks)


CALL_TEXT = ("So:", "<tool", '_call>\n{"name": "weather", ', '"arguments": {"city": "Tromsø"}}\n</tool_call>')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_tool(stream: bool) -> None:
    script = (fake.started(), *map(fake.delta, CALL_TEXT), fake.finished())
    body = await ask(script, "chat/completions", tools=TOOLS, stream=stream)
    if stream:
        deltas = [choice["delta"] for choice in choices_of(body, 0)]
        assert "".join(delta.get("content", "") for delta in deltas) == "So:"
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert call.pop("index") == 0
        assert choices_of(body, 0)[-1]["finish_reason"] == "tool_calls"
    else:
        (choice,) = body["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Tromsø"}


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_where_no_tool_may_be_called_a_call_is_text(fields: dict[str, Any]) -> None:
    script = (fake.started(), *map(fake.delta, CALL_TEXT), fake.finished())
    (choice,) = (await ask(script, "chat/completions", **fields))["choices"]
    assert choice["message"]["content"] == "".join(CALL_TEXT) and choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_stays_text() -> None:
    script = (fake.started(), *map(fake.delta, CALL_TEXT[:-1]), fake.finished(LENGTH))
    chunks = await ask(script, "chat/completions", tools=TOOLS, stream=True)
    choices = choices_of(chunks, 0)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "".join(CALL_TEXT[:-1])
    assert choices[-1]["finish_reason"] == "length"
