"""The official Python client against the gateway on a port; what it generates is scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fake_frontend as fake
import openai
import pytest
from fake_frontend import FakeFrontend, Script
from gateway import serving
from openai import AsyncOpenAI

from pageferry.core.errors import ResourceExhaustedError, UnauthenticatedError, UnavailableError, invalid

MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def connected(script: Script = fake.HELLO) -> AsyncIterator[tuple[AsyncOpenAI, FakeFrontend]]:
    frontend = FakeFrontend(script)
    async with (
        serving(frontend) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="pf_key", max_retries=0) as client,
    ):
        yield client, frontend


async def test_answers_whole_and_streamed() -> None:
    async with connected() as (client, frontend):
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=9)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("Hello", "stop")
        assert chat.usage is not None and chat.usage.total_tokens == 7
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], extra_body={"top_k": 3})
        assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
        assert frontend.requests[-1].sampling.top_k == 3
        options = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options=options
        )
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert last.usage is not None and last.usage.prompt_tokens == 5
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert frontend.authorizations[0] == ["Bearer pf_key"]


async def test_the_helpers_of_the_client() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    async with connected() as (client, frontend):
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES, response_format=schema) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Hello"
        assert frontend.requests[0].sampling.grammar.json_schema == '{"type": "object"}'
        raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, user="u")
        assert raw.headers["x-ignored-fields"] == "user"
        assert raw.request_id == raw.headers["x-request-id"]


async def test_log_probabilities() -> None:
    script = (fake.started(), fake.delta("<10>", fake.token(0, 10, -0.5, [(10, -0.5), (11, -1.5)])), fake.finished())
    async with connected(script) as (client, _):
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [
            ("<10>", -0.5),
            ("<11>", -1.5),
        ]
        completion = await client.completions.create(model="tiny", prompt="a", logprobs=2)
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.token_logprobs == [-0.5]


async def test_calls_of_tools() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with connected((fake.started(), fake.delta(call[:20]), fake.delta(call[20:]), fake.finished())) as (
        client,
        _,
    ):
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=tools) as stream:
            async for _ in stream:
                pass
            choice = (await stream.get_final_completion()).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        answer = choice.message.model_dump(exclude_none=True)
        results = [{"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}]
        await client.chat.completions.create(model="tiny", messages=[*MESSAGES, answer, *results], tools=tools)


async def test_responses() -> None:
    async with connected() as (client, _):
        response = await client.responses.create(model="tiny", input="hi", instructions="Be brief.")
        assert (response.output_text, response.status) == ("Hello", "completed")
        assert response.usage is not None and response.usage.output_tokens == 2
        async with client.responses.stream(model="tiny", input="hi") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "Hello"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


async def test_leaving_a_stream_cancels_the_generation() -> None:
    async with connected((*fake.HELLO[:2], asyncio.Event())) as (client, frontend):
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert not frontend.closed.is_set()
        await stream.close()
        await asyncio.wait_for(frontend.closed.wait(), 60)


@pytest.mark.field("waybarrios/vllm-mlx#101", "mozilla-ai/any-llm#847")
async def test_an_error_in_mid_stream_is_raised_as_one() -> None:
    script = (*fake.HELLO[:2], UnavailableError("the decode worker is gone", reason="GONE"))
    async with connected(script) as (client, _):
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        seen = set[str | None]()
        with pytest.raises(openai.APIError, match="the decode worker is gone") as caught:
            async for chunk in stream:
                seen.add(chunk.choices[0].finish_reason)
    assert seen == {None} and caught.value.code == "gone"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (invalid("temperature", -1.0, "must be 0 or positive"), openai.BadRequestError),
        (UnauthenticatedError("no key", reason="NO_API_KEY"), openai.AuthenticationError),
        (ResourceExhaustedError("queue is full", retry_after_ms=1500), openai.RateLimitError),
        (UnavailableError("no worker"), openai.InternalServerError),
    ],
)
async def test_errors_are_the_client_s_own(error: Exception, kind: type[openai.APIStatusError]) -> None:
    async with connected((error,)) as (client, _):
        with pytest.raises(kind) as caught:
            await client.completions.create(model="tiny", prompt="a")
    assert str(error) in str(caught.value) and caught.value.request_id
