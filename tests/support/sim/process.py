"""Simulated processes: all that one does runs in its context, which its tasks and callbacks inherit.

So it can be paused, when its callbacks wait, as those of a process that was stopped by a signal do, and killed, when
they never run.
"""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from enum import Enum
from typing import Any

from sim.loop import PROCESS, VirtualLoop


class Life(Enum):
    UP = "up"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """One incarnation of a service; `network` is that which its channels and servers are of."""

    def __init__(self, loop: VirtualLoop, name: str, network: Any) -> None:
        self.loop = loop
        self.name = name
        self.network = network
        self.life = Life.UP
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._context = Context()
        self._context.run(PROCESS.set, self)
        self._held: list[asyncio.Handle] = []

    def may_run(self, handle: asyncio.Handle) -> bool:
        if self.life is not Life.UP:
            self._held.append(handle)
        return self.life is Life.UP

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call it as this process would."""
        return self._context.copy().run(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        task = self.loop.create_task(coroutine, name=name, context=self._context.copy())
        task.add_done_callback(self._note_failure, context=Context())
        return task

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.loop.problems.append("".join(traceback.format_exception(error)))

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon(function, *args, context=self._context.copy())

    def later(self, seconds: float, function: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, function, *args, context=self._context.copy())

    def pause(self) -> None:
        if self.life is Life.UP:
            self.life = Life.PAUSED

    def resume(self) -> None:
        if self.life is Life.PAUSED:
            self._go_on()

    def kill(self) -> None:
        self.life = Life.DEAD

    def _go_on(self) -> None:
        self.life = Life.UP
        held, self._held = self._held, []
        self.loop.again(held)

    async def bury(self) -> None:
        """Take what a dead process has left apart, at the end of a simulation: here, nothing of it shows any more."""
        problems = list(self.loop.problems)
        self._go_on()
        for _ in range(100):
            for task in list(self.tasks):
                task.cancel()
            await asyncio.sleep(0.05)
            if not self.tasks:
                break
        self.life = Life.DEAD
        self.loop.problems[:] = problems


def current_process() -> Process:
    process = PROCESS.get()
    assert process is not None, "only a simulated process does this"
    return process
