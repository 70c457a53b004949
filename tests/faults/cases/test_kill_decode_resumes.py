"""kill -9 of a decode worker with streams running: each goes on elsewhere, with the tokens of an undisturbed run."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import Stub, greedy
from moments import ENDLESS, SOON_S, servers_of
from services import Deployment
from streams import Golden, Stream, prompt_of, request_span
from traces import spans_of

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

NUM_STREAMS = 20
MAX_TOKENS = 800


@pytest.mark.field("ai-dynamo/dynamo#7930", "ai-dynamo/dynamo#1930", "ai-dynamo/dynamo#2310")
async def test_twenty_streams_outlive_one_of_two_decode_workers(linked: Deployment, stub: Stub, golden: Golden) -> None:
    requests = [greedy(prompt_of(95_000 + number, 20 + 7 * number), MAX_TOKENS) for number in range(NUM_STREAMS)]
    expected = await asyncio.gather(*(golden(request) for request in requests))
    streams = [Stream(stub, request) for request in requests]
    await asyncio.gather(*(stream.until(10) for stream in streams))
    linked.decode[0].kill()
    answers = await asyncio.gather(*(stream.rest() for stream in streams))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    spans = [await request_span(stub, stream.trace_id) for stream in streams]
    resumed_at = [at for span in spans if (at := span.attributes.get("pageferry.resumed_at")) is not None]
    assert len(resumed_at) >= NUM_STREAMS // 4, "the other worker had nearly all of them"
    assert all(10 <= at < MAX_TOKENS for at in resumed_at)


async def was_resumed(stub: Stub, stream: Stream) -> bool:
    return "pageferry.resumed_at" in (await request_span(stub, stream.trace_id)).attributes


STATEFUL = {
    "seeded draws": {"sampling": SamplingParams(temperature=1, seed=11)},
    "penalties": {
        "sampling": SamplingParams(
            temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=2
        )
    },
    "a stop string, once it may count": {
        "sampling": SamplingParams(temperature=1, seed=5),
        "stop": StopConditions(max_tokens=1000, ignore_eos=True, min_tokens=900),
        "stop_strings": ["th", "a"],
    },
}


@pytest.mark.field("ai-dynamo/dynamo#7930")
@pytest.mark.parametrize("what", STATEFUL)
async def test_what_counts_on_earlier_tokens_counts_on_them_elsewhere(
    linked: Deployment, stub: Stub, golden: Golden, what: str
) -> None:
    request = greedy(prompt_of(95_100 + list(STATEFUL).index(what), 100), 1000)
    request.MergeFrom(pb.GenerateRequest(**STATEFUL[what]))
    expected = await golden(request)
    stream = await Stream(stub, request).until(10)
    _, decode = await servers_of(linked, stub, stream.trace_id)
    decode.kill()
    answer = await stream.rest()
    assert answer.token_ids == expected.token_ids
    assert (answer.text, answer.reason, answer.usage) == (expected.text, expected.reason, expected.usage)
    assert await was_resumed(stub, stream)


async def test_several_answers_go_on_elsewhere_each_after_its_last_token(
    linked: Deployment, stub: Stub, golden: Golden
) -> None:
    request = greedy(prompt_of(95_110, 100), 600)
    request.MergeFrom(pb.GenerateRequest(n=3, sampling=SamplingParams(temperature=1, seed=42)))
    expected = await golden(request)
    stream = await Stream(stub, request).until(5, num_choices=3)
    _, decode = await servers_of(linked, stub, stream.trace_id)
    decode.kill()
    answer = await stream.rest()
    await request_span(stub, stream.trace_id)
    spans = spans_of((await stub.GetTrace(pb.GetTraceRequest(id=stream.trace_id))).traces_data)
    resumed = [span.attributes["pageferry.choice"] for span in spans if "pageferry.resumed_at" in span.attributes]
    assert sorted(resumed) == [0, 1, 2]
    assert answer.choices == expected.choices
    assert len({tuple(choice.token_ids) for choice in answer.choices.values()}) == 3
    assert answer.usage.completion_tokens == expected.usage.completion_tokens


@pytest.fixture(scope="module")
def once(tiny_model: Path) -> Iterator[Deployment]:
    """A router that does not resume, and more of nothing than is needed."""
    settings = {"router.resumes": "0"}
    with Deployment(prefill=1, decode=1, settings=settings, model=tiny_model) as deployment:
        yield deployment


@pytest.fixture
async def once_stub(once: Deployment) -> AsyncIterator[Stub]:
    async with once.lent() as stub:
        yield stub


async def test_a_stream_that_may_not_be_resumed_says_so_after_its_tokens(once: Deployment, once_stub: Stub) -> None:
    stream = await Stream(once_stub, greedy(prompt_of(95_200, 100), ENDLESS)).until(10)
    once.decode[0].kill()
    error = await stream.failure()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert 10 <= stream.num_tokens < ENDLESS
    assert once.decode[0].address in (error.details() or "")


@pytest.mark.field("waybarrios/vllm-mlx#101", "mozilla-ai/any-llm#847")
async def test_a_failure_amid_a_stream_of_events_is_an_event_and_the_end(once: Deployment, once_stub: Stub) -> None:
    body = {"prompt": prompt_of(95_201, 100), "temperature": 0, "ignore_eos": True, "stream": True}
    body["max_tokens"] = ENDLESS
    lines: list[str] = []
    async with httpx.AsyncClient(base_url=once.routers[0].http, timeout=SOON_S) as client:
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):  # nor does the transport call it a good end
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    lines += [line] if line else []
                    if len(lines) == 5:
                        once.decode[0].kill()
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"]
    assert once.decode[0].address in error["message"]
    assert not any('"finish_reason":"' in line.replace(" ", "") for line in lines)
    assert "data: [DONE]" not in lines


@pytest.mark.field("waybarrios/vllm-mlx#101")
async def test_a_stream_of_events_that_ends_well_ends_once(once: Deployment, once_stub: Stub) -> None:
    body = {"prompt": prompt_of(95_202, 40), "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with httpx.AsyncClient(base_url=once.routers[0].http, timeout=60) as client:
        response = await client.post("/v1/completions", json=body)
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    *others, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert last["usage"]["completion_tokens"] == 5
    reasons = [choice["finish_reason"] for chunk in others for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


@pytest.mark.parametrize("dead", ["prefill", "decode"])
async def test_the_only_worker_of_a_kind_is_killed(
    once: Deployment, once_stub: Stub, golden: Golden, dead: str
) -> None:
    """A decode worker serves alone; nobody serves without one, and requests are told at once."""
    (victim,) = once.prefill if dead == "prefill" else once.decode
    victim.kill()
    stream = Stream(once_stub, greedy(prompt_of(95_203, 100), 20))
    if dead == "prefill":
        assert (await stream.rest()).token_ids == (await golden(greedy(prompt_of(95_203, 100), 20))).token_ids
    else:
        async with asyncio.timeout(SOON_S):
            error = await stream.failure()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert victim.address in (error.details() or "")
