"""Sends requests when they are due, and notes what comes of each."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from pageferry.loadgen.result import MS, Record
from pageferry.loadgen.target import Answer, Question, RequestFailedError, Target


@dataclass(slots=True)
class Driven:
    """What came of the requests that ended; `num_dropped` were in flight as the run was broken off."""

    records: list[Record] = field(default_factory=list)
    send_lags_ms: list[float] = field(default_factory=list)  # behind the schedule; none in a closed loop
    num_dropped: int = 0
    num_other_inputs: int = 0  # completed requests whose prompt has another length than meant
    num_other_outputs: int = 0  # and whose answer has
    interrupted: bool = False  # by Ctrl-C


def took_ctrl_c() -> bool:
    """To be asked where CancelledError was caught: whether it is Ctrl-C, which cancels the main task; takes it back."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return False
    task.uncancel()
    return True


class Driver:
    """One run. `on_record` sees each request that ended, and breaks the run off by returning True."""

    def __init__(self, target: Target, timeout_s: float, on_record: Callable[[Record], bool]) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._on_record = on_record
        self._driven = Driven()
        self._start_s = 0.0
        self._run: asyncio.Task[None] | None = None
        self._broken_off = False

    async def closed(self, questions: Iterator[Question], concurrency: int, duration_s: float | None) -> Driven:
        """That many requests at a time, each following one that ended; none begins after `duration_s`."""

        async def ask_on() -> None:
            while duration_s is None or perf_counter() - self._start_s < duration_s:
                question = next(questions, None)
                if question is None:
                    return
                await self._ask(question)

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(ask_on())

        return await self._until_done(run())

    async def open(self, questions: Iterator[Question], max_concurrency: int | None) -> Driven:
        """Each at its time, whatever is in flight; with a cap, one that is due waits, and is sent late."""
        room = asyncio.Semaphore(max_concurrency) if max_concurrency else None

        async def ask(question: Question) -> None:
            try:
                await self._ask(question)
            finally:
                if room is not None:
                    room.release()

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                for question in questions:
                    due_s = self._start_s + (question.at_s or 0.0)
                    if (early_s := due_s - perf_counter()) > 0:
                        await asyncio.sleep(early_s)
                    if room is not None:
                        await room.acquire()
                    group.create_task(ask(question))

        return await self._until_done(run())

    async def _until_done(self, run: Coroutine[None, None, None]) -> Driven:
        self._start_s = perf_counter()
        self._run = asyncio.create_task(run)
        try:
            await self._run
        except BaseExceptionGroup as group:  # of a question that can't be made, or a mistake of ours
            raise group.exceptions[0] from None
        except asyncio.CancelledError:
            self._driven.interrupted = took_ctrl_c()
            await asyncio.gather(self._run, return_exceptions=True)
        return self._driven

    async def _ask(self, question: Question) -> None:
        started_s = perf_counter()
        if question.at_s is not None:
            lag_ms = (started_s - self._start_s - question.at_s) * MS
            self._driven.send_lags_ms.append(max(0.0, lag_ms))  # a timer's tick early is on time
        answer = Answer(started_s)
        problem: str | None = None
        ended_s = 0.0
        try:
            async with asyncio.timeout(self._timeout_s):
                ended_s = await self._target.ask(question, answer)
        except RequestFailedError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no end within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            self._driven.num_dropped += 1
            raise
        if problem is not None:
            ended_s = perf_counter()
        self._note(question, self._record(question, answer, started_s, ended_s, problem))

    def _note(self, question: Question, record: Record) -> None:
        driven = self._driven
        driven.records.append(record)
        if record.error is None:
            driven.num_other_inputs += record.input_tokens != question.input_tokens
            driven.num_other_outputs += record.output_tokens != question.output_tokens
        if self._on_record(record) and self._run is not None and not self._broken_off:
            self._broken_off = True
            self._run.cancel()

    def _record(
        self, question: Question, answer: Answer, started_s: float, ended_s: float, problem: str | None
    ) -> Record:
        """Counts are the server's, else the prompt's own length and one token a piece."""
        return Record(
            start_s=started_s - self._start_s,
            ttft_ms=answer.ttft_ms,
            e2e_ms=(ended_s - started_s) * MS,
            input_tokens=question.input_tokens if answer.input_tokens is None else answer.input_tokens,
            output_tokens=answer.num_pieces if answer.output_tokens is None else answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            gaps_ms=tuple(answer.gaps_ms),
            error=problem,
        )
