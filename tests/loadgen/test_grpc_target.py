from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import fake_frontend as fake
import fake_inference
import pytest

from pageferry.core.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from pageferry.loadgen.grpc_target import GrpcTarget
from pageferry.loadgen.target import Answer, Question, RequestFailedError, ServerLoad
from pageferry.v1 import inference_pb2 as pb

QUESTION = Question("Once upon", 5, 2, seed=3)


@asynccontextmanager
async def target(address: str, **options: Any) -> AsyncIterator[GrpcTarget]:
    made = GrpcTarget(address, **({"model": "", "api_key": "", "temperature": 0.0, "chat": False} | options))
    try:
        yield made
    finally:
        await made.close()


async def test_what_is_sent() -> None:
    async with fake_inference.serving() as (address, service), target(address, api_key="key") as made:
        assert await made.prepare() == [] and made.info.model == "tiny"
        await made.ask(QUESTION, Answer(0.0))
    (request,) = service.frontend.requests
    assert (request.model, request.prompt, request.sampling.seed) == ("tiny", "Once upon", 3)
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.ignore_eos) == (2, 2, True)
    assert service.metadata["authorization"] == "Bearer key"


async def test_a_chat_is_one_message() -> None:
    async with fake_inference.serving() as (address, service), target(address, chat=True) as made:
        await made.ask(QUESTION, Answer(0.0))
    (request,) = service.frontend.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "Once upon")]


async def test_pieces_and_counts() -> None:
    silent = fake.delta("text that was held back")
    two = fake.delta("lo", fake.token(1, 11), fake.token(2, 12))
    script = (fake.started(), fake.delta("Hel", fake.token(0, 10)), silent, two, fake.finished())
    async with fake_inference.serving(*script) as (address, _), target(address) as made:
        answer = Answer(perf_counter())
        ended_s = await made.ask(QUESTION, answer)
    assert answer.num_pieces == 2 and len(answer.gaps_ms) == 1  # two tokens in one message are one gap
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (5, 2, 4)
    assert ended_s >= answer.last_s and answer.ttft_ms is not None


async def test_an_error_is_a_failure_with_its_code() -> None:
    error = ResourceExhaustedError("the queue is full")
    async with fake_inference.serving(fake.started(), error) as (address, _), target(address) as made:
        with pytest.raises(RequestFailedError, match=r"^RESOURCE_EXHAUSTED: the queue is full$"):
            await made.ask(QUESTION, Answer(0.0))


async def test_a_stream_without_an_end_is_a_failure() -> None:
    async with fake_inference.serving(*fake.HELLO[:2]) as (address, _), target(address) as made:
        answer = Answer(0.0)
        with pytest.raises(RequestFailedError, match="without a terminal event"):
            await made.ask(QUESTION, answer)
    assert answer.num_pieces == 1


async def test_a_model_that_is_not_served() -> None:
    async with fake_inference.serving() as (address, _), target(address, model="other") as made:
        with pytest.raises(NotFoundError, match="serves no model 'other', but tiny"):
            await made.prepare()


async def test_nobody_listens() -> None:
    async with target("127.0.0.1:1") as made:
        with pytest.raises(UnavailableError, match=r"no router answers at 127\.0\.0\.1:1; start one with"):
            await made.prepare()
        assert await made.server_load() is None


async def test_the_load_is_that_of_decode_workers() -> None:
    async with fake_inference.serving() as (address, service), target(address) as made:
        decode = service.workers[0].load
        decode.running, decode.waiting, decode.pages_resident, decode.pages_cached = 3, 1, 2, 30
        prefill = pb.WorkerStatus(role="prefill")
        prefill.load.running, prefill.load.waiting, prefill.load.pages_total = 1, 4, 100
        service.workers.append(prefill)
        load = await made.server_load()
    assert load == ServerLoad(running=3, waiting=3 + 1 + 4, batch_sizes=(3,), pages_used=2, pages_total=64)
