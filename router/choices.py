"""The answers to one request: a Generation each, put together into one stream of events with exactly one end.

The first goes first. The others begin once a decode worker has its prompt, and share the prompt's full pages there:
each computes what lies behind them, at most a page, and takes pages of its own for that and for what it generates.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import set_span_in_context

from pageferry.core.errors import PageferryError
from pageferry.router.admission import Admitted
from pageferry.router.answer import Answer
from pageferry.router.beam import answers_of
from pageferry.router.merged import merged
from pageferry.router.request import Generation
from pageferry.router.serving import Serving
from pageferry.router.timeline import Timeline
from pageferry.text.detokenize import TextStream
from pageferry.text.pieces import Pieces
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import Usage

Events = AsyncGenerator[pb.GenerateResponse, None]
CHOICE_SPAN = "choice"
_Deltas = AsyncGenerator[pb.Delta | None, None]  # of an answer; None: it has ended


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
                num_choices = self._admitted.num_choices
                answers = [Answer() for _ in range(num_choices)]
                begin = [partial(self._deltas, choice, stack, deadline) for choice in range(num_choices)]
                # What is not read stays where it is counted, and merged.
                async with aclosing(merged(begin, at_once=num_choices, max_unread=1)) as all_deltas:
                    async for choice, more in all_deltas:
                        for event in self._take(choice, more, answers):
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

    async def _deltas(self, choice: int, first: ExitStack, deadline: float | None) -> _Deltas:
        """`first` holds the first answer's `_asked`."""
        if choice == 0:
            asked: AbstractContextManager[object] = first.pop_all()
        else:
            other = self._generations[0]
            await other.stored.wait()
            asked = self._asked(choice, deadline, other.decode)
        with asked:
            async with aclosing(self._generations[choice].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            yield None

    def _take(self, choice: int, delta: pb.Delta | None, answers: list[Answer]) -> Iterator[pb.GenerateResponse]:
        """What is told of it now: nothing, where answers are compared."""
        is_ranked = self._admitted.is_ranked
        if delta is None:
            answers[choice] = self._ended(choice, answers[choice].deltas)
            if not is_ranked:
                yield answers[choice].end(choice)
        elif is_ranked:
            answers[choice].deltas.append(delta)
        else:
            yield pb.GenerateResponse(delta=delta)

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
