"""What the calls that bring work have in common on both kinds of worker."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import time_ns
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Link, Tracer, get_current_span

from pageferry.core.constraint import Constraint
from pageferry.core.errors import AlreadyExistsError, FailedPreconditionError, PageferryError, UnavailableError
from pageferry.core.sampling import Grammar
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.runtime.device_spans import device_attributes
from pageferry.runtime.engine_thread import EngineThread, Stepper
from pageferry.runtime.logs import log
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.reports import Publisher
from pageferry.runtime.telemetry import PastSpans
from pageferry.runtime.worker_step import ChunkDone, StepDone

MAX_PROFILE_CHARACTERS = 64
_HELD_UP_S = 1e-4  # between readings of two clocks that should be of one moment


class HasParent(Protocol):
    """A call, whose spans are below that of the context."""

    parent: Context


Call = TypeVar("Call", bound=HasParent)
Event = TypeVar("Event")


class ConstraintSource(Protocol):
    """Makes what outputs must match; `text.grammar.Grammars`."""

    async def constraint(self, grammar: Grammar, output_ids: tuple[int, ...]) -> Constraint: ...


class WorkCalls(ABC, Generic[Call, Event]):
    """The live calls of a worker, on the event loop, and the engine's thread that works for them."""

    engine_type: type[EngineThread[Any]] = EngineThread  # another one where there is no thread, as in simulations
    constraints: ConstraintSource | None = None  # set by who joins the worker with a tokenizer
    device_name: str = ""  # that the model is on, for spans; set by who joins the worker with it

    def __init__(self, step: Stepper[Event], tracer: Tracer, publisher: Publisher, clock: Callable[[], float]) -> None:
        self._publisher = publisher
        self._clock = clock
        self._spans = PastSpans(tracer, partial(wall_offset_ns, clock))
        self._ids = LiveIds()
        self._calls: dict[Sequence, Call] = {}
        self.engine: EngineThread[Event] = self.engine_type(step, self._deliver, name="engine", clock=clock)

    @property
    def num_calls(self) -> int:
        """Calls that are live."""
        return len(self._calls)

    def start(self) -> None:
        self.engine.start()
        self.engine.failed.add_done_callback(lambda failed: self._fail_all(failed.result()))

    async def stop(self) -> None:
        """After the server's end."""
        await self.engine.stop()

    async def _new_sequence(self, work: WorkItem, context: Any, *, computes_prompt: bool) -> Sequence:
        """The sequence of a call. Raises FailedPreconditionError where its grammar can't be matched here."""
        sequence = Sequence(work, self._clock(), deadline_of(context, self._clock))
        if computes_prompt and work.sampling.num_prompt_logprobs is not None:
            sequence.prompt_logprobs = []
        grammar = work.sampling.grammar
        if grammar is not None:
            if self.constraints is None:
                raise FailedPreconditionError("this worker has no tokenizer to match grammars", reason="NO_TOKENIZER")
            sequence.constraint = await self.constraints.constraint(grammar, work.output_ids)
        return sequence

    @abstractmethod
    def _deliver(self, events: list[Event]) -> None:
        """Take what the engine's thread has to tell."""

    @abstractmethod
    def _fail(self, call: Call, error: PageferryError) -> None:
        """End a call whose engine has failed."""

    def _fail_all(self, failure: BaseException) -> None:
        error = UnavailableError(f"the worker's engine failed: {type(failure).__name__}", reason="ENGINE_FAILED")
        for call in self._calls.values():
            self._fail(call, error)

    def _record_chunk(self, parent: Context, chunk: ChunkDone) -> None:
        attributes = {"pageferry.chunk.start": chunk.start, "pageferry.chunk.tokens": chunk.num_tokens}
        device = device_attributes(self.device_name, chunk.device_s)
        self._spans.record("prefill.chunk", parent, chunk.started, chunk.ended, {**attributes, **device})

    def _record_step(self, name: str, step: StepDone) -> None:
        """A trace of its own, linked to its requests' that are sampled, if there are any."""
        contexts = [get_current_span(self._calls[one].parent) for one in step.sequences if one in self._calls]
        sampled = [span.get_span_context() for span in contexts if span.get_span_context().trace_flags.sampled]
        if not sampled:
            return
        attributes = {
            "pageferry.step.sequences": len(step.sequences),
            "pageferry.step.tokens": step.num_tokens,
            "pageferry.step.prompt_tokens": step.num_prompt_tokens,
            "pageferry.step.preempted": step.num_preempted,
            "pageferry.step.pages_used": step.num_pages_used,
            "pageferry.forward_ms": step.forward_s * 1000,
            **device_attributes(self.device_name, step.device_s),
        }
        self._spans.record(name, Context(), step.started, step.ended, attributes, [Link(one) for one in sampled])

    def _log(self, event: str, sequence: Sequence, error: PageferryError) -> None:
        request_id = sequence.work.request_id
        log(event, level="warning", request_id=request_id, reason=error.reason, message=error.message)


def profile_attributes(work: WorkItem) -> dict[str, str]:
    """Of a worker's spans: the request's profile, as the router calls it."""
    return {"pageferry.profile": work.profile[:MAX_PROFILE_CHARACTERS]} if work.profile else {}


class LiveIds:
    """The ids of the requests that are live on this worker."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    @contextmanager
    def claim(self, request_id: str) -> Iterator[None]:
        """Hold the id for as long as the block runs; AlreadyExistsError where a live request has it."""
        if request_id in self._ids:
            raise AlreadyExistsError(f"request_id {request_id!r} is live on this worker", reason="REQUEST_ID_LIVE")
        self._ids.add(request_id)
        try:
            yield
        finally:
            self._ids.remove(request_id)


def wall_offset_ns(clock: Callable[[], float]) -> int:
    """From the clock to the wall clock; both are read again where something came between the readings."""
    for _ in range(3):
        before, wall, after = clock(), time_ns(), clock()
        if after - before < _HELD_UP_S:
            break
    return wall - round((before + after) / 2 * 1e9)


@dataclass(slots=True)
class Outcome:
    """How a call ended, as the metrics name it."""

    name: str = "other"


@contextmanager
def counted(metrics: Metrics) -> Iterator[Outcome]:
    """Count a call when the block is over: by the outcome that the block has set, or the error that it raised."""
    outcome = Outcome()
    try:
        yield outcome
    except PageferryError as error:
        outcome.name = error.code.lower()
        raise
    except asyncio.CancelledError:
        outcome.name = "cancelled"
        raise
    finally:
        metrics.count_request(outcome.name)


def deadline_of(context: Any, clock: Callable[[], float]) -> float | None:
    """When the call's deadline passes, in seconds of the worker's clock."""
    remaining = context.time_remaining()
    return None if remaining is None else clock() + float(remaining)


def loading() -> UnavailableError:
    """The answer to work that comes before the model is there."""
    return UnavailableError("the worker is loading its model", reason="LOADING", retry_after_ms=1000)
