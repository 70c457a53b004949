"""One stream for many Decode calls: a message a step, slow readers, and the end of stream or calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import golden, make_work
from handoff_bench import Bench, Gate, until

from pageferry.core.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from pageferry.decode_svc import call, subscriptions
from pageferry.runtime.convert_work import work_to_proto
from pageferry.v1 import decode_pb2 as pb

NAME = b"n" * 16


class Reader:
    """A call's context; takes no message while `resume` is clear."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.resume.set()
        self.messages: list[Any] = []

    async def write(self, message: Any) -> None:
        await self.resume.wait()
        self.messages.append(message)

    def time_remaining(self) -> float | None:
        return None


class Watched:
    """A subscription to the bench's decode worker, and calls to it."""

    def __init__(self, bench: Bench) -> None:
        self.worker = bench.d.worker
        self.reader = Reader()
        self.stream = asyncio.create_task(
            self.worker.subscriptions.serve(pb.SubscribeRequest(subscription=NAME), self.reader)
        )

    def call(self, number: int, max_tokens: int = 6, name: bytes = NAME) -> tuple["asyncio.Task[None]", Reader]:
        own = Reader()
        request = request_of(number, f"r{number}", max_tokens, name)
        return asyncio.create_task(self.worker.decode(request, own)), own

    def events(self, number: int) -> list[pb.CallEvents]:
        return [events for message in self.reader.messages for events in message.calls if events.call == number]

    def tokens(self, number: int) -> list[tuple[int, int]]:
        return [(token.position, token.token_id) for events in self.events(number) for token in events.tokens]

    def is_told(self, *numbers: int) -> Callable[[], Any]:
        async def check() -> bool:
            return all(any(events.HasField("completed") for events in self.events(number)) for number in numbers)

        return check


def request_of(number: int, request_id: str, max_tokens: int = 6, name: bytes = NAME) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        work=work_to_proto(make_work(request_id, prompt(number), max_tokens=max_tokens)),
        source=pb.PROMPT_SOURCE_LOCAL,
        subscription=name,
        call=number,
    )


def prompt(number: int) -> list[int]:
    return [number, *range(8)]


def expected(number: int, num_tokens: int = 6) -> list[tuple[int, int]]:
    return list(enumerate(golden(prompt(number), num_tokens)))


async def test_a_step_is_one_message_and_calls_own_streams_hold_no_token() -> None:
    async with Bench() as bench:
        watched, gate = Watched(bench), Gate()
        bench.d.runner.before = gate  # so that both are there before the first step
        calls = [watched.call(number) for number in (1, 2)]
        await gate.reached()
        gate.open()
        await asyncio.gather(*(task for task, _ in calls))
        await until(watched.is_told(1, 2))
        for number, (_, own) in enumerate(calls, 1):
            assert watched.tokens(number) == expected(number)
            (reserved,) = own.messages
            assert reserved.reserved.subscribed
            assert [events.HasField("completed") for events in watched.events(number)].count(True) == 1
            assert watched.events(number)[-1].HasField("completed")
        assert any(len(message.calls) == 2 for message in watched.reader.messages)
        watched.stream.cancel()
        assert await bench.d.is_idle()


async def test_a_slow_reader_holds_nothing_up_and_gets_all_in_few_messages() -> None:
    async with Bench() as bench:
        watched = Watched(bench)
        watched.reader.resume.clear()
        task, _ = watched.call(1, 100)
        await task  # the call is over before its tokens are read
        assert await bench.d.is_idle()
        watched.reader.resume.set()
        await until(watched.is_told(1))
        assert watched.tokens(1) == expected(1, 100)
        assert len(watched.reader.messages) <= 4


async def test_where_no_such_subscription_is_live_the_call_tells_itself() -> None:
    async with Bench() as bench:
        watched = Watched(bench)
        task, own = watched.call(1, name=b"m" * 16)
        await task
        reserved, *tokens, completed = own.messages
        assert not reserved.reserved.subscribed
        assert [token.token_id for message in tokens for token in message.tokens.tokens] == golden(prompt(1), 6)
        assert completed.HasField("completed")
        assert [*watched.reader.messages] == [pb.SubscribeResponse()]


async def test_the_end_of_the_stream_fails_its_calls_and_frees_what_they_held() -> None:
    async with Bench() as bench:
        watched, gate = Watched(bench), Gate(after=3)
        bench.d.runner.before = gate
        task, _ = watched.call(1, 50)
        await gate.reached()
        watched.stream.cancel()
        with pytest.raises(UnavailableError) as caught:
            await task
        assert caught.value.reason == "SUBSCRIPTION_ENDED"
        gate.open()
        await until(bench.d.is_idle)
        await Watched(bench).call(2)[0]  # another can have the name now


async def test_nothing_is_told_of_a_call_that_was_cancelled() -> None:
    async with Bench() as bench:
        watched, both_there, amid = Watched(bench), Gate(), Gate(after=20)
        bench.d.runner.before = lambda *_: (both_there(), amid())
        watched.reader.resume.clear()
        cancelled, _ = watched.call(1, 1000)
        other, _ = watched.call(2)
        await both_there.reached()
        both_there.open()
        await other
        cancelled.cancel()
        await asyncio.wait([cancelled])
        amid.open()
        watched.reader.resume.set()
        await until(watched.is_told(2))
        assert len(watched.tokens(1)) < 1000
        assert not any(events.HasField("completed") for events in watched.events(1))
        await until(bench.d.is_idle)


async def test_names_are_16_bytes_and_live_once() -> None:
    async with Bench() as bench:
        watched = Watched(bench)
        await watched.call(1)[0]
        serve = bench.d.worker.subscriptions.serve
        with pytest.raises(InvalidArgumentError, match="3 bytes"):
            await serve(pb.SubscribeRequest(subscription=b"abc"), Reader())
        with pytest.raises(AlreadyExistsError):
            await serve(pb.SubscribeRequest(subscription=NAME), Reader())


async def test_two_calls_of_one_number_never_mingle() -> None:
    async with Bench() as bench:
        watched = Watched(bench)
        watched.reader.resume.clear()
        first, _ = watched.call(1)
        await first  # over, but nothing is told of it yet
        with pytest.raises(AlreadyExistsError) as caught:
            await bench.d.worker.decode(request_of(1, "r2"), Reader())
        assert caught.value.reason == "CALL_NUMBER_LIVE"
        watched.reader.resume.set()
        await until(watched.is_told(1))
        assert watched.tokens(1) == expected(1)
        await bench.d.worker.decode(request_of(1, "r3"), Reader())  # the number is free again
        await until(bench.d.is_idle)


async def test_a_drained_worker_tells_all_and_then_ends_the_stream() -> None:
    async with Bench() as bench:
        watched = Watched(bench)
        bench.d.main.ready = bench.d.worker
        watched.reader.resume.clear()
        await watched.call(1)[0]
        drained = asyncio.create_task(bench.d.main.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        watched.reader.resume.set()
        await drained
        assert watched.stream.done()
        assert watched.tokens(1) == expected(1)


@pytest.mark.parametrize("most", [3, 10])  # less and more than a call has
async def test_a_message_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (subscriptions, call):
        monkeypatch.setattr(module, "MOST_TOKENS", most)
    async with Bench() as bench:
        watched = Watched(bench)
        watched.reader.resume.clear()
        await asyncio.gather(*(watched.call(number)[0] for number in range(1, 8)))
        watched.reader.resume.set()
        await until(watched.is_told(*range(1, 8)))
        assert [watched.tokens(number) for number in range(1, 8)] == [expected(number) for number in range(1, 8)]
        sizes = [sum(len(events.tokens) for events in message.calls) for message in watched.reader.messages]
        assert most // 2 < max(sizes) <= most
