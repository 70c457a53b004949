"""The answers to one request: a Generation each, put together into one stream of events with exactly one end.

The first goes first. The others begin once a decode worker has its prompt, and share the prompt's full pages there:
each computes what lies behind them, at most a page, and takes pages of its own for that and for what it generates.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import set_span_in_context

from pageferry.core.errors import PageferryError
from pageferry.router.admission import Admitted
from pageferry.router.answer import Answer
from pageferry.router.beam import answers_of
from pageferry.router.request import Generation
from pageferry.router.request_span import Timeline
from pageferry.router.serving import Serving
from pageferry.text.detokenize import TextStream
from pageferry.text.pieces import Pieces
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import Usage

Events = AsyncGenerator[pb.GenerateResponse, None]
CHOICE_SPAN = "choice"


@dataclass(slots=True)
class _News:
    """More of an answer, or, without a delta, its end; or the error that ends the request."""

    choice: int
    delta: pb.Delta | None = None
    error: Exception | None = None


class Choices:
    """Use `events` once, and close it: that ends everything that was begun for the request."""

    def __init__(
        self, serving: Serving, admitted: Admitted, pieces: Pieces, timeline: Timeline, context: Context
    ) -> None:
        """`timeline` is filled by the first answer; `context` holds the request's own span."""
        self._serving = serving
        self._admitted = admitted
        self._pieces = pieces
        self._timeline = timeline
        self._context = context
        self._generations: dict[int, Generation] = {}  # those that have begun
        self._error: PageferryError | None = None  # that was given to `end`

    @property
    def num_live(self) -> int:
        """Answers that wait for workers or run."""
        return sum(generation.is_live for generation in self._generations.values())

    @property
    def usage(self) -> Usage:
        """The prompt once, and what all answers have come to so far, those that are not sent too."""
        num_prompt = len(self._admitted.prompt_ids)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=sum(generation.num_tokens for generation in self._generations.values()),
            cached_tokens=min(self._timeline.cached_tokens, num_prompt),
        )

    async def events(self, started: pb.Started, deadline: float | None) -> Events:
        """`started`, then deltas and ends of answers, then Finished; or the PageferryError that ends the request."""
        with ExitStack() as stack:
            first = stack.enter_context(self._asked(0, deadline))
            yield pb.GenerateResponse(started=started)
            if self._admitted.num_choices == 1:
                async with aclosing(first.deltas()) as deltas:
                    async for delta in deltas:
                        yield pb.GenerateResponse(delta=delta)
                best = self._ended(0)
                if self._admitted.beam is not None:
                    answers = self._beams(first)
                    for choice, answer in enumerate(answers):
                        for event in answer.events(choice):
                            if len(answers) > 1 or event.HasField("delta"):
                                yield event
                    best = answers[0]
            else:
                answers = [Answer() for _ in range(self._admitted.num_choices)]
                async with aclosing(self._news(stack, deadline)) as all_news:
                    async for news in all_news:
                        for event in self._take(news, answers):
                            yield event
                if self._admitted.is_ranked:
                    answers = ranked(answers, self._admitted)
                    for choice, answer in enumerate(answers):
                        for event in answer.events(choice):
                            yield event
                best = answers[0]
        yield pb.GenerateResponse(finished=self._finished(best))

    def end(self, error: PageferryError) -> None:
        """Make `events` raise the error at the next chance."""
        self._error = error
        for generation in self._generations.values():
            generation.end(error)

    @contextmanager
    def _asked(self, choice: int, deadline: float | None, near: str = "") -> Iterator[Generation]:
        """An answer waits for workers, or runs, inside the block: see `Generation.asked`."""
        if self._error is not None:
            raise self._error
        context, timeline = self._context, self._timeline
        with ExitStack() as stack:
            if self._admitted.num_choices > 1:
                tracer, attributes = self._serving.telemetry.tracer, {"pageferry.choice": choice}
                span = tracer.start_span(CHOICE_SPAN, context, attributes=attributes)
                stack.callback(span.end)
                context = set_span_in_context(span, context)
            if choice > 0:
                timeline = Timeline(timeline.arrival, timeline.arrival_ns)
            text = text_of(self._admitted, self._pieces)
            generation = Generation(self._serving, self._admitted, text, timeline, context, choice)
            self._generations[choice] = generation
            stack.enter_context(generation.asked(deadline, near))
            yield generation

    async def _news(self, first: ExitStack, deadline: float | None) -> AsyncGenerator[_News, None]:
        """What comes of all answers, as it comes. `first` holds the first one's `_asked`."""
        # One item: what is not read stays where it is counted, and merged.
        queue: asyncio.Queue[_News] = asyncio.Queue(1)
        tasks = [asyncio.create_task(self._read_first(first, queue))]
        tasks += [
            asyncio.create_task(self._read_other(choice, deadline, queue))
            for choice in range(1, self._admitted.num_choices)
        ]
        num_left = len(tasks)
        try:
            while num_left:
                news = await queue.get()
                if news.error is not None:
                    raise news.error
                num_left -= news.delta is None
                yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_first(self, asked: ExitStack, queue: "asyncio.Queue[_News]") -> None:
        with asked.pop_all():
            await self._read(0, queue)

    async def _read_other(self, choice: int, deadline: float | None, queue: "asyncio.Queue[_News]") -> None:
        first = self._generations[0]
        await first.stored.wait()
        try:
            with self._asked(choice, deadline, first.decode):
                await self._read(choice, queue)
        except Exception as error:  # it could not wait for workers
            await queue.put(_News(choice, error=error))

    async def _read(self, choice: int, queue: "asyncio.Queue[_News]") -> None:
        try:
            async with aclosing(self._generations[choice].deltas()) as deltas:
                async for delta in deltas:
                    await queue.put(_News(choice, delta))
            end = _News(choice)
        except Exception as error:
            end = _News(choice, error=error)
        await queue.put(end)

    def _take(self, news: _News, answers: list[Answer]) -> Iterator[pb.GenerateResponse]:
        """What is told of it now: nothing, where answers are compared."""
        is_ranked = self._admitted.is_ranked
        if news.delta is None:
            answers[news.choice] = self._ended(news.choice, answers[news.choice].deltas)
            if not is_ranked:
                yield answers[news.choice].end(news.choice)
        elif is_ranked:
            answers[news.choice].deltas.append(news.delta)
        else:
            yield pb.GenerateResponse(delta=news.delta)

    def _beams(self, search: Generation) -> list[Answer]:
        texts = [text_of(self._admitted, self._pieces) for _ in range(self._admitted.n)]
        return answers_of(search.hypotheses, texts)

    def _ended(self, choice: int, deltas: list[pb.Delta] | None = None) -> Answer:
        generation = self._generations[choice]
        return Answer(deltas or [], generation.finish, generation.matched_stop)

    def _finished(self, best: Answer) -> pb.Finished:
        now = self._serving.clock()
        timings = self._timeline.timings(now)
        timings.total_ms = max(answer.timeline.total_ms(now) for answer in self._generations.values())
        return pb.Finished(
            reason=best.reason,
            matched_stop=best.matched_stop,
            usage=self.usage,
            timings=timings,
            pages=self._timeline.pages,
        )


def text_of(admitted: Admitted, pieces: Pieces) -> TextStream:
    """The text of one answer."""
    return TextStream(
        pieces,
        admitted.stop_strings,
        skip_special=admitted.skip_special,
        min_tokens=admitted.stop.min_tokens,
        echo_ids=admitted.prompt_ids if admitted.echo else (),
    )


def ranked(answers: list[Answer], admitted: Admitted) -> list[Answer]:
    """The `n` likeliest, likeliest first."""
    for answer in answers:
        answer.score = mean_logprob(answer.deltas)
        if not admitted.wants_logprobs:
            for delta in answer.deltas:
                for token in delta.tokens:
                    token.ClearField("logprobs")
    best = sorted(answers, key=lambda answer: -(answer.score or 0.0))[: admitted.n]
    told, first = answers[0].deltas[0], best[0].deltas[0]  # the prompt is told of once, with what is sent first
    if told is not first and told.HasField("prompt_logprobs"):
        first.prompt_logprobs.CopyFrom(told.prompt_logprobs)
        told.ClearField("prompt_logprobs")
    return best


def mean_logprob(deltas: list[pb.Delta]) -> float:
    """Of the tokens of an answer."""
    logprobs = [token.logprobs.sampled.logprob for delta in deltas for token in delta.tokens]
    return sum(logprobs) / max(1, len(logprobs))
