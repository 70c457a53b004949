"""The one thread that owns the model, the pool and the scheduler, and its seam to the event loop."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pageferry.core.errors import UnavailableError

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
T = TypeVar("T")

# The event loop gets the interpreter back this soon while a step runs Python code.
SWITCH_INTERVAL_S = 0.0005


class Stepper(Protocol[E_co]):
    """What the thread drives; all its methods run on the thread."""

    def step(self, now: float) -> list[E_co]:
        """Do one step of work, where there is any, and return what the event loop must do."""
        ...

    def next_wakeup(self, now: float) -> float | None:
        """Seconds until the next step; 0: work is ready; None: only a command can bring work."""
        ...


@dataclass(slots=True)
class _Command:
    run: Callable[[], Any]
    result: "asyncio.Future[Any] | None"  # None: nobody waits


class EngineThread(Generic[E]):
    """Runs a Stepper. Commands run in the order given, before the next step; `deliver` gets a step's events on the loop.

    Events of a step are delivered before the results of commands that ran after it, and after those of commands that
    ran before it. If a step or a posted command raises, `failed` gets the exception and the thread ends: the state that
    it owns can't be trusted any more.
    """

    failed: "asyncio.Future[BaseException]"

    def __init__(
        self,
        stepper: Stepper[E],
        deliver: Callable[[list[E]], None],
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stepper = stepper
        self._deliver = deliver
        self._clock = clock
        self._wake = threading.Condition()  # guards the three below
        self._commands: list[_Command] = []
        self._stopping = False
        self._closed = False
        self._waiting = True
        self._progress = clock()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Call on the event loop that shall get the events."""
        self._loop = asyncio.get_running_loop()
        self.failed = self._loop.create_future()
        self._ended = asyncio.Event()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    @property
    def last_progress(self) -> float:
        """When the thread last finished a step; now, while it waits for work."""
        return self._clock() if self._waiting else self._progress

    def post(self, command: Callable[[], object]) -> None:
        """Run the command on the thread. UnavailableError after the thread's end."""
        self._put(_Command(command, None))

    async def call(self, command: Callable[[], T]) -> T:
        """Run the command on the thread and return its result, or raise what it raised.

        The command runs even if the caller is cancelled meanwhile. UnavailableError after the thread's end.
        """
        result: asyncio.Future[T] = self._loop.create_future()
        self._put(_Command(command, result))
        return await result

    async def stop(self) -> None:
        """End the thread after the current step and the commands given so far; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await self._ended.wait()

    def _put(self, command: _Command) -> None:
        with self._wake:
            if self._closed or self._stopping:
                raise UnavailableError("the engine has stopped", reason="ENGINE_STOPPED")
            self._commands.append(command)
            self._wake.notify()

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            while self._run_commands():
                events = self._stepper.step(self._clock())
                self._progress = self._clock()
                if events:
                    self._loop.call_soon_threadsafe(self._deliver, events)
                self._wait(self._stepper.next_wakeup(self._clock()))
        except BaseException as error:
            failure = error
        with self._wake:
            self._closed = True
            left, self._commands = self._commands, []
        stopped = UnavailableError("the engine has stopped", reason="ENGINE_STOPPED")
        self._to_loop(lambda: self._end(failure, [(command, None, stopped) for command in left]))

    def _wait(self, seconds: float | None) -> None:
        with self._wake:
            if self._commands or self._stopping or seconds == 0:
                return
            self._waiting = True
            self._wake.wait(seconds)
            self._progress = self._clock()
            self._waiting = False

    def _run_commands(self) -> bool:
        """False: the thread shall end."""
        with self._wake:
            commands, self._commands = self._commands, []
            stopping = self._stopping
        done: list[tuple[_Command, object, Exception | None]] = []
        try:
            for command in commands:
                done.append(self._run(command))
        finally:
            if any(command.result for command, _, _ in done):
                self._to_loop(lambda: _settle(done))
        return not stopping

    def _run(self, command: _Command) -> tuple[_Command, object, Exception | None]:
        if command.result is None:
            command.run()
            return command, None, None
        try:
            return command, command.run(), None
        except Exception as error:
            return command, None, error

    def _to_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _end(self, failure: BaseException | None, left: "list[tuple[_Command, object, Exception | None]]") -> None:
        _settle(left)
        if failure is not None and not self.failed.done():
            self.failed.set_result(failure)
        self._ended.set()


def _settle(done: list[tuple[_Command, object, Exception | None]]) -> None:
    for command, value, error in done:
        if command.result is None or command.result.done():
            continue
        if error is not None:
            command.result.set_exception(error)
        else:
            command.result.set_result(value)
