"""What the calls that bring work have in common on both kinds of worker."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import time_ns
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Tracer
from opentelemetry.util.types import AttributeValue

from pageferry.core.errors import AlreadyExistsError, PageferryError, UnavailableError
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.telemetry import record_span


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


class PastSpans:
    """Records spans of what is over, from seconds of the worker's clock."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._clock = clock

    def record(
        self, name: str, parent: Context, start: float, end: float, attributes: Mapping[str, AttributeValue]
    ) -> None:
        wall = time_ns() - int(self._clock() * 1e9)
        record_span(self._tracer, name, parent, wall + int(start * 1e9), wall + int(end * 1e9), attributes)


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
