"""A target without a server: answers are made up by the test, at once or once it opens a gate."""

import asyncio
from collections.abc import Callable
from time import perf_counter

from pageferry.loadgen.result import Target as TargetInfo
from pageferry.loadgen.target import Answer, Question, RequestFailedError, ServerLoad


def full_answer(question: Question, answer: Answer) -> None:
    """All as asked for, 100 ms to the first token and 10 ms between tokens."""
    answer.ttft_ms = 100.0
    answer.gaps_ms = [10.0] * (question.output_tokens - 1)
    answer.num_pieces = question.output_tokens
    answer.input_tokens, answer.output_tokens, answer.cached_tokens = question.input_tokens, question.output_tokens, 0


class FakeTarget:
    """`fill` writes an answer, and may raise; with a gate, no answer ends before it is open."""

    info = TargetInfo("openai", "fake", "tiny")

    def __init__(
        self, fill: Callable[[Question, Answer], None] = full_answer, gate: asyncio.Event | None = None
    ) -> None:
        self.fill, self.gate = fill, gate
        self.asked: list[Question] = []
        self.in_flight = self.most_in_flight = 0
        self.load: ServerLoad | None = None
        self.notes: list[str] = []
        self.changed = asyncio.Condition()

    async def prepare(self) -> list[str]:
        return self.notes

    async def ask(self, question: Question, answer: Answer) -> float:
        self.asked.append(question)
        await self._count(+1)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            self.fill(question, answer)
        finally:
            self.in_flight -= 1
        return perf_counter()

    async def _count(self, number: int) -> None:
        async with self.changed:
            self.in_flight += number
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.changed.notify_all()

    async def until_in_flight(self, number: int) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: self.in_flight >= number), 60)

    async def server_load(self) -> ServerLoad | None:
        return self.load

    async def close(self) -> None:
        pass


def failing(text: str) -> Callable[[Question, Answer], None]:
    def fill(question: Question, answer: Answer) -> None:
        raise RequestFailedError(text)

    return fill
