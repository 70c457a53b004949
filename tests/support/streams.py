"""A Generate stream that a test reads as far as it likes before something happens to it, and what its trace says."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Self

import grpc
from answer import Answer
from cluster import Stub
from traces import Span, one, wait_trace

from pageferry.v1 import inference_pb2 as pb

_REQUEST = Counter({("pageferry.request", "SERVER"): 1})
Golden = Callable[[pb.GenerateRequest], Coroutine[Any, Any, Answer]]


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Token ids that no other number's prompt shares a page with: they begin with the number."""
    digits = [number // 311**place % 311 for place in range(3)]
    return [4 + value for value in (*digits, *(index * (index * 7 + 3) % 311 for index in range(3, num_tokens)))]


class Stream:
    """Begun at once, and read as it comes, on a task of its own: each position once and in order, and one end."""

    def __init__(self, stub: Stub, request: pb.GenerateRequest, *, timeout_s: float = 100, **metadata: str) -> None:
        self.answer = Answer()
        self._changed = asyncio.Event()
        self._call = stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata.items()))
        self._reader = asyncio.create_task(self._read())

    @property
    def trace_id(self) -> str:
        assert self.answer.started is not None
        return self.answer.started.trace_id

    @property
    def num_tokens(self) -> int:
        return len(self.answer.token_ids)

    @property
    def is_over(self) -> bool:
        return self._reader.done()

    async def started(self) -> Self:
        return await self._until(lambda: self.answer.started is not None)

    async def until(self, num_tokens: int, *, num_choices: int = 1) -> Self:
        """Until so many tokens have come of each of so many answers."""
        choices = self.answer.choices
        return await self._until(
            lambda: sum(len(choice.token_ids) >= num_tokens for choice in choices.values()) >= num_choices
        )

    async def rest(self) -> Answer:
        """Raises AioRpcError where it fails."""
        await self._reader
        assert self.answer.finished is not None, "the stream ended without a terminal event"
        num_tokens = sum(len(choice.token_ids) for choice in self.answer.choices.values())
        assert self.answer.usage.completion_tokens == num_tokens
        return self.answer

    async def failure(self) -> grpc.aio.AioRpcError:
        """The error that it must end with."""
        try:
            await self._reader
        except grpc.aio.AioRpcError as error:
            assert self.answer.finished is None, "an error after success"
            return error
        raise AssertionError(f"it ended well, with {self.num_tokens} tokens")

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self.answer.take(response)
                self._changed.set()
        finally:
            self._changed.set()

    async def _until(self, reached: Callable[[], bool]) -> Self:
        while not reached():
            if self.is_over:
                self._reader.result()
                raise AssertionError(f"the stream ended after {self.num_tokens} tokens")
            self._changed.clear()
            await self._changed.wait()
        return self


async def request_span(stub: Stub, trace_id: str) -> Span:
    """The router's own, once it has ended."""
    return one(await wait_trace(stub, trace_id, _REQUEST), "pageferry.request", "SERVER")
