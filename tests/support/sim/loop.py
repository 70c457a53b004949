"""An event loop whose time jumps to the next timer, and that asks the process that a callback is of."""

import asyncio
import gc
import heapq
import itertools
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

import pytest

# The process that runs.
PROCESS: "ContextVar[Owner | None]" = ContextVar("process", default=None)
START_S = 1000.0
_MAX_TURNS = 20_000


class Owner(Protocol):
    """What a process is to the loop: whether its callbacks may run, and who knows its tasks."""

    tasks: dict[asyncio.Task[Any], None]

    def may_run(self, handle: asyncio.Handle) -> bool: ...


class StuckError(AssertionError):
    """Everybody waits, and no timer is left to end that; or somebody never waits."""


class _Jump:
    """In place of a selector: there are no files, and waiting takes no time."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop
        self._num_turns = 0  # since time has passed

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise StuckError("nothing is left that could happen")
        self._num_turns += 1
        if timeout > 0:
            self._loop.jump()
            self._num_turns = 0
        if self._num_turns > _MAX_TURNS:
            ready = "; ".join(repr(handle) for handle in self._loop._ready)  # type: ignore[attr-defined]
            raise StuckError(
                f"{_MAX_TURNS} turns of the loop, and time stands still: {ready or self._loop._scheduled[0]}"
            )
        return []


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        process = _process_of(self)
        if process is None or process.may_run(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        process = _process_of(self)
        if process is None or process.may_run(self):
            super()._run()


def _process_of(handle: Any) -> Owner | None:
    return handle._context.get(PROCESS)


class _Numbered:
    """Hashed by when it was made: sets of such are gone through in the same order in each run."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        made.number = next(_NUMBERS)  # type: ignore[attr-defined]
        return made

    def __hash__(self) -> int:
        return self.number  # type: ignore[attr-defined, no-any-return]


_NUMBERS = itertools.count()


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    pass


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    pass


class VirtualLoop(asyncio.BaseEventLoop):
    """Use with `run`. What goes wrong without anybody to tell is in `problems`."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START_S
        self._selector = _Jump(self)
        self._clock_resolution = 1e-9
        self.problems: list[str] = []
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _, context: self.problems.append(_describe(context)))

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]

    def create_future(self) -> Any:
        return _Future(loop=self)

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def again(self, handles: list[asyncio.Handle]) -> None:
        """Run those that were held up, in their order."""
        self._ready.extend(handle for handle in handles if not handle.cancelled())  # type: ignore[attr-defined]

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end with virtual time, where a thread or a real wait is an error."""
        with _alone():
            return self.run_until_complete(main)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None) -> Any:
    context = context if context is not None else copy_context()
    task = _Task(coroutine, loop=loop, context=context)
    process = context.get(PROCESS)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None), context=Context())
    return task


def _describe(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


@contextmanager
def _alone() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a thread or a real wait in a simulation")

    gc.disable()  # it would end what is dropped at other times in each run
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr(time, "sleep", refuse)
            yield
    finally:
        gc.enable()
