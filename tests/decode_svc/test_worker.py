"""The decode worker's calls where a real channel would hide what happens: slow readers, and an engine that fails."""

import asyncio
from typing import Any

import pytest
from fake_engine import golden, make_work
from handoff_bench import Bench, until
from prometheus_client import generate_latest

from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.runtime.convert_work import work_to_proto
from pageferry.v1 import decode_pb2


class SlowContext:
    """A call whose reader takes no message before `resume` is set."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.messages: list[decode_pb2.DecodeResponse] = []

    async def write(self, message: decode_pb2.DecodeResponse) -> None:
        if message.HasField("tokens"):
            await self.resume.wait()
        self.messages.append(message)

    def time_remaining(self) -> float | None:
        return None


def request_of(
    request_id: str, source: Any = decode_pb2.PROMPT_SOURCE_LOCAL, **fields: Any
) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(work=work_to_proto(make_work(request_id, range(9), **fields)), source=source)


async def test_a_slow_reader_holds_nothing_up_and_gets_all_tokens_in_few_messages() -> None:
    async with Bench() as bench:
        context = SlowContext()
        call = asyncio.create_task(bench.d.worker.decode(request_of("slow", max_tokens=100), context))

        async def is_generated() -> bool:
            return len(context.messages) == 1 and await bench.d.is_idle()

        await until(is_generated)  # its pages are free before anything was read
        context.resume.set()
        await call
        reserved, *tokens, completed = context.messages
        assert reserved.HasField("reserved")
        assert completed.HasField("completed")
        assert [token.token_id for message in tokens for token in message.tokens.tokens] == golden(range(9), 100)
        assert [token.position for message in tokens for token in message.tokens.tokens] == list(range(100))
        assert len(tokens) <= 3


async def test_an_engine_that_fails_ends_its_calls_with_the_reason() -> None:
    async with Bench() as bench:

        def fail(_: object) -> None:
            raise MemoryError

        bench.d.runner.before = fail
        with pytest.raises(UnavailableError, match="MemoryError") as caught:
            await bench.d.worker.decode(request_of("r"), SlowContext())
        assert caught.value.reason == "ENGINE_FAILED"
        with pytest.raises(UnavailableError):
            await bench.d.worker.decode(request_of("r"), SlowContext())
        assert bench.d.worker.num_calls == 0


async def test_a_request_must_say_where_its_prompt_is_computed() -> None:
    async with Bench() as bench:
        with pytest.raises(InvalidArgumentError, match="source"):
            await bench.d.worker.decode(request_of("r", decode_pb2.PROMPT_SOURCE_UNSPECIFIED), SlowContext())


async def test_ends_are_counted_by_outcome() -> None:
    async with Bench() as bench:
        context = SlowContext()
        context.resume.set()
        await bench.d.worker.decode(request_of("r", max_tokens=5), context)
        with pytest.raises(InvalidArgumentError):
            await bench.d.worker.decode(request_of("r", max_tokens=10**6), context)
        metrics = generate_latest(bench.d.publisher.metrics.registry).decode()
        assert 'pageferry_requests_total{outcome="length"} 1.0' in metrics
        assert 'pageferry_requests_total{outcome="invalid_argument"} 1.0' in metrics
        assert 'pageferry_tokens_total{kind="generated"} 5.0' in metrics
        assert 'pageferry_tokens_total{kind="prompt"} 9.0' in metrics
