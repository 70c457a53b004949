import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fake_frontend as fake
import fake_inference
import pytest
from fake_frontend import FakeFrontend
from fake_inference import FakeInference
from fake_trace import example
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pageferry.client import Client, PageferryError, Result, SyncClient
from pageferry.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    invalid,
)
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types


@asynccontextmanager
async def serving(*script: fake.Step) -> AsyncIterator[tuple[Client, FakeInference]]:
    async with fake_inference.serving(*script) as (address, service), Client(address) as client:
        yield client, service


def check_hello(result: Result) -> None:
    assert (result.text, result.token_ids, result.finish_reason) == ("Hello", (10, 11), "stop")
    assert (result.request_id, result.trace_id, result.model) == ("r-1", fake.TRACE_ID, "tiny")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (5, 2, 4)
    assert result.timings_ms["transfer_tail"] == 3
    assert (result.pages.format, result.pages.shipped, result.pages.hidden) == ("int8", 3, 0.75)


async def test_deltas_then_the_result() -> None:
    async with serving() as (client, service):
        generation = client.generate("Say hello", max_tokens=8, stop="!", seed=7, timeout_s=5)
        assert [delta.text async for delta in generation] == ["Hel", "lo"]
        check_hello(await generation.result())
        assert [delta async for delta in generation] == []
        request = service.frontend.requests[0]
        assert (request.prompt, request.stop.max_tokens, list(request.stop_strings)) == ("Say hello", 8, ["!"])
        assert request.sampling.seed == 7 and not request.sampling.HasField("temperature")


async def test_the_result_alone() -> None:
    async with serving() as (client, _):
        check_hello(await client.generate([1, 2, 3]).result())


async def test_forms_of_a_prompt() -> None:
    async with serving() as (client, service):
        await client.generate([1, 2]).result()
        await client.generate([{"role": "user", "content": "hi"}]).result()
        await client.generate([]).result()
    ids, chat, empty = service.frontend.requests
    assert list(ids.token_ids.ids) == [1, 2]
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]
    assert empty.WhichOneof("input") == "token_ids"


async def test_logprobs() -> None:
    scripted = fake.token(0, 10, -0.5, [(10, -0.5), (12, -2.0)])
    async with serving(fake.started(), fake.delta("x", scripted), fake.finished()) as (client, _):
        (token,) = (await client.generate("a", logprobs=2).result()).tokens
    assert (token.logprob, token.top) == (-0.5, ((10, -0.5), (12, -2.0)))


async def test_options_become_the_fields_of_the_contract() -> None:
    async with serving() as (client, service):
        tool = {"type": "function", "function": {"name": "é"}}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12", "tool_call_id": "c"},
            {"role": "assistant", "content": "The"},
        ]
        of_chat = {"tools": [tool], "template_variables": {"x": 1}, "continue_last": True}
        counts = {"n": 2, "best_of": 4, "max_repeats": 3, "prompt_logprobs": 0, "profile": "quality"}
        await client.generate(messages, **of_chat, **counts, bad_words="no", logit_bias={7: -100}).result()
        await client.generate(
            "a", echo=True, json_schema={"type": "object"}, bad_words=["a", "b"], banned=[[1, 2], (3,)]
        ).result()
        await client.generate("a", beam_width=3, length_penalty=0.5, early_stopping="never").result()
        for grammar in ({"json_schema": "{}"}, {"json_object": True}, {"regex": "a+"}, {"lark": "start: /a/"}):
            await client.generate("a", **grammar).result()
        await client.generate("a", choices=["yes", "no"], regex=None, json_object=False).result()
    chat, text, beam, *grammars = service.frontend.requests
    assert [(m.role, m.content, m.name, m.tool_call_id) for m in chat.chat.messages] == [
        ("user", "hi", "ann", ""),
        ("assistant", "", "", ""),
        ("tool", "12", "", "c"),
        ("assistant", "The", "", ""),
    ]
    assert json.loads(chat.chat.messages[1].tool_calls_json) == [call]
    assert (json.loads(chat.chat.tools_json), chat.chat.continue_last) == ([tool], True)
    assert json.loads(chat.chat.template_variables_json) == {"x": 1}
    assert (chat.n, chat.best_of, chat.stop.max_repeats, chat.profile) == (2, 4, 3, "quality")
    assert chat.sampling.HasField("prompt_logprobs")
    assert (dict(chat.sampling.logit_bias), list(chat.bad_words)) == ({7: -100}, ["no"])
    assert (text.echo, text.sampling.grammar.json_schema) == (True, '{"type": "object"}')
    assert (list(text.bad_words), [list(each.ids) for each in text.sampling.banned]) == (["a", "b"], [[1, 2], [3]])
    assert (beam.beam.width, beam.beam.length_penalty, beam.beam.early_stopping) == (3, 0.5, types.EARLY_STOPPING_NEVER)
    assert [request.sampling.grammar.WhichOneof("kind") for request in grammars] == [
        *("json_schema", "json_object", "regex", "lark", "choices")
    ]
    assert list(grammars[-1].sampling.grammar.choices.texts) == ["yes", "no"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids"),
        ({"logit_bias": [1]}, "logit_bias must map token ids"),
        ({"bad_words": [1]}, "bad_words must be a list, and each of it a string"),
        ({"banned": [[1], [-1]]}, r"banned\[1\] must be a list, and each of it a whole number from 0"),
        ({"banned": [1]}, r"banned\[0\] must be a list"),
        ({"n": -1}, "n is -1, must be a whole number from 0"),
        ({"regex": "a", "choices": ["a"]}, "choices must not be given together with regex"),
        ({"json_schema": {"a": object()}}, "json_schema must be what JSON can hold"),
        ({"beam_width": "x"}, "beam_width is 'x', must be a whole number"),
        ({"length_penalty": 1.0}, "length_penalty must be given with beam_width only"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping must be heuristic, first or never"),
        ({"tools": [{}]}, "tools must be given with a conversation only"),
    ],
)
async def test_options_that_no_field_holds_are_refused_by_name(options: dict[str, object], message: str) -> None:
    async with serving() as (client, _):
        with pytest.raises(InvalidArgumentError, match=message):
            client.generate("a", **options)


async def test_several_answers() -> None:
    first, second = fake.delta("He", fake.token(0, 10)), fake.delta("Ho", fake.token(0, 12))
    second.delta.choice = 1
    first.delta.prompt_logprobs.tokens.add(sampled=types.TokenLogprob(token_id=7, logprob=-0.5))
    more = fake.delta("y", fake.token(1, 11))
    ends = [
        pb.GenerateResponse(choice_finished=pb.ChoiceFinished(choice=choice, reason=reason, score=score))
        for choice, reason, score in ((1, types.FINISH_REASON_REPETITION, -1.5), (0, types.FINISH_REASON_STOP, None))
    ]
    async with serving(fake.started(), first, second, more, *ends, fake.finished()) as (client, _):
        generation = client.generate("a", n=2, prompt_logprobs=0)
        deltas = [delta async for delta in generation]
        assert [(delta.choice, delta.text) for delta in deltas] == [(0, "He"), (1, "Ho"), (0, "y")]
        assert (generation.text, generation.text_of(1), generation.text_of(2)) == ("Hey", "Ho", "")
        result = await generation.result()
    assert [choice.text for choice in result.choices] == ["Hey", "Ho"]
    assert [(choice.finish_reason, choice.score) for choice in result.choices] == [("stop", None), ("repetition", -1.5)]
    assert [choice.token_ids for choice in result.choices] == [(10, 11), (12,)]
    assert (result.text, result.finish_reason, result.token_ids) == ("Hey", "stop", (10, 11))
    assert [(token.position, token.token_id, token.logprob) for token in result.prompt] == [(1, 7, -0.5)]
    assert deltas[0].prompt == result.prompt


@pytest.mark.parametrize("way", ["break", "aclose", "with", "cancel", "drop", "task"])
async def test_whoever_stops_reading_cancels(way: str) -> None:
    async with serving(*fake.HELLO[:2], asyncio.Event()) as (client, service):
        generation = client.generate("a")
        if way == "break":
            async for _ in generation:
                break
        elif way == "aclose":
            await anext(aiter(generation))
            await generation.aclose()
        elif way == "with":
            async with generation:
                await anext(aiter(generation))
        elif way == "cancel":
            async for _ in generation:
                generation.cancel()
        elif way == "task":
            reading = asyncio.create_task(generation.result())
            await service.frontend.waiting.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await service.frontend.called.wait()
            del generation
        await asyncio.wait_for(service.frontend.closed.wait(), 60)
        if way in ("break", "with", "cancel"):
            with pytest.raises(CancelledError):
                await generation.result()
            assert generation.text == "Hel" and generation.trace_id == fake.TRACE_ID


@pytest.mark.parametrize(
    "error",
    [
        invalid("temperature", -1.0, "must be 0 or finite and positive"),
        ResourceExhaustedError("queue is full", reason="QUEUE_FULL", retry_after_ms=1500),
        UnavailableError("no worker", reason="NO_WORKER", retry_after_ms=10),
    ],
)
async def test_errors_come_back_as_they_were_raised(error: PageferryError) -> None:
    async with serving(fake.started(), error) as (client, _):
        generation = client.generate("a")
        with pytest.raises(type(error)) as caught:
            async for _ in generation:
                pass
        with pytest.raises(type(error)):
            await generation.result()
    raised = caught.value
    assert (raised.message, raised.reason, raised.retry_after_ms) == (error.message, error.reason, error.retry_after_ms)
    assert raised.violations == error.violations


async def test_a_deadline() -> None:
    async with serving(fake.started(), asyncio.Event()) as (client, service):
        for timeout_s in (0.05, 0.5, 5.0, 50.0):
            with pytest.raises(DeadlineExceededError):
                await client.generate("a", timeout_s=timeout_s).result()
            if service.frontend.called.is_set():  # else it never got to its server, on a machine that is so busy
                break
        await asyncio.wait_for(service.frontend.closed.wait(), 60)


async def test_a_stream_without_a_finish_is_an_error() -> None:
    async with serving(*fake.HELLO[:2]) as (client, _):
        with pytest.raises(InternalError, match="without a finish"):
            await client.generate("a").result()


async def test_nobody_listens() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.generate("a").result()
        with pytest.raises(UnavailableError):
            await client.models()


@pytest.mark.parametrize("option", [{"top_k": -1}, {"seed": 2**64}, {"temperature": "hot"}, {"stop": [1]}])
async def test_a_value_that_its_field_cannot_hold_is_named(option: dict[str, object]) -> None:
    async with Client() as client:
        with pytest.raises(InvalidArgumentError) as caught:
            client.generate("a", **option)
    assert caught.value.violations[0].field == next(iter(option))


async def test_an_unknown_option_is_a_type_error() -> None:
    async with Client() as client:
        with pytest.raises(TypeError, match="'beams'"):
            client.generate("a", beams=2)
        with pytest.raises(InvalidArgumentError, match=r"messages\[0\]"):
            client.generate([{"role": "user", "text": "a"}])


async def test_the_current_trace_goes_along() -> None:
    parent = SpanContext(int(fake.TRACE_ID, 16), 0xB7AD6B7169203331, is_remote=False, trace_flags=TraceFlags(1))
    async with serving() as (client, service):
        with trace.use_span(NonRecordingSpan(parent)):
            generation = client.generate("a")
        await generation.result()
        assert service.metadata["traceparent"] == f"00-{fake.TRACE_ID}-b7ad6b7169203331-01"
        with trace.use_span(NonRecordingSpan(parent)), SyncClient(client.address) as blocking:
            await asyncio.to_thread(lambda: blocking.generate("b").result())
        assert str(service.metadata["traceparent"]).startswith(f"00-{fake.TRACE_ID}-")


async def test_other_calls() -> None:
    async with serving() as (client, _):
        assert list((await client.tokenize("ab")).pieces) == ["a", "b"]
        assert len((await client.tokenize([{"role": "user", "content": "abc"}])).ids) == 3
        assert [model.name for model in await client.models()] == ["tiny"]
        assert (await client.status()).queued == 3
        assert await client.trace("some-id") == example()
        with pytest.raises(NotFoundError, match="not kept"):
            await client.trace("unknown")
    with pytest.raises(RuntimeError, match="async with"):
        await client.models()


async def test_the_blocking_client_does_the_same() -> None:
    def talk(address: str) -> None:
        with SyncClient(address) as client:
            generation = client.generate("Say hello")
            assert [delta.text for delta in generation] == ["Hel", "lo"]
            check_hello(generation.result())
            assert client.models()[0].name == "tiny"
            assert client.status().queued == 3
            assert list(client.tokenize("ab").ids) == [1, 1]
            assert client.trace("some-id") == example()
            with pytest.raises(NotFoundError):
                client.trace("unknown")

    async with serving() as (client, _):
        await asyncio.to_thread(talk, client.address)


@pytest.mark.parametrize("way", ["break", "with", "cancel", "drop"])
async def test_whoever_stops_reading_the_blocking_client_cancels(way: str) -> None:
    def talk(address: str, frontend: FakeFrontend) -> None:
        with SyncClient(address) as client:
            generation = client.generate("a")
            if way == "break":
                for _ in generation:
                    break
            elif way == "with":
                with generation:
                    next(iter(generation))
            elif way == "cancel":
                for _ in generation:
                    generation.cancel()
            else:
                asyncio.run_coroutine_threadsafe(frontend.called.wait(), loop).result(60)
                del generation
            if way != "drop":
                with pytest.raises(CancelledError):
                    generation.result()
            asyncio.run_coroutine_threadsafe(frontend.closed.wait(), loop).result(60)

    async with serving(*fake.HELLO[:2], asyncio.Event()) as (client, service):
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(talk, client.address, service.frontend)
