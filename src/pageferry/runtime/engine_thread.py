"""The one thread that owns the model, the pool and the scheduler, and its seam to the event loop."""

import asyncio
import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

from pageferry.core.errors import UnavailableError
from pageferry.runtime.watchdog import Sign

E = TypeVar("E")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

# The event loop gets the interpreter back this soon while a step runs Python code.
SWITCH_INTERVAL_S = 0.0005
_PR_SET_NAME = 15


class Stepper(Protocol[E]):
    """What the thread drives; all its methods run on the thread."""

    def step(self, now: float) -> list[E]:
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
    """Runs a Stepper: commands in the order given, then a step, whose events `deliver` gets on the event loop.

    While there is work it crosses to the loop once a step at most, with the events of the one and the answers of the
    commands before the next; before it waits, what there is crosses at once. A step's events are delivered before a
    later command's caller goes on; but they may well be delivered before an earlier command's caller does, who must
    therefore be ready for them when it calls. If a step or a posted command raises, `failed` gets the exception and the
    thread ends: the state that it owns can't be trusted any more.
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
        self._commands: deque[_Command] = deque()
        self._stopping = False
        self._closed = False
        self._num_turns = 0
        self._idle_until = -math.inf  # on its clock; while it waits, infinite where only a command can bring work
        self._cpu_clock: int | None = None  # set by the thread itself
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Call on the event loop that shall get the events."""
        self._loop = asyncio.get_running_loop()
        self.failed = self._loop.create_future()
        self._ended = asyncio.Event()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Run the command on the thread; after the thread's end there is nothing left to free or give back."""
        with suppress(UnavailableError):
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

    def sign(self) -> Sign:
        """Of its progress; takes no lock, so that a frozen thread can't hold the caller up."""
        has_work = bool(self._commands) or self._idle_until <= self._clock()
        cpu_s: float | None = None
        if self._cpu_clock is not None:
            with suppress(OSError):  # it is over
                cpu_s = time.clock_gettime(self._cpu_clock)
        return Sign(self._num_turns, has_work, cpu_s)

    def _put(self, command: _Command) -> None:
        with self._wake:
            if self._closed or self._stopping:
                raise _stopped()
            self._commands.append(command)
            self._wake.notify()

    def _main(self) -> None:
        failure: BaseException | None = None
        _name_thread(self._thread.name)
        if hasattr(time, "pthread_getcpuclockid"):
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._loop_steps()
        except BaseException as error:
            failure = error
        with self._wake:
            self._closed = True
        left = [command.result for command in self._commands if command.result is not None]
        answers: list[_Answer] = [(result, None, _stopped()) for result in left]
        call_on_loop(self._loop, self._end, failure, answers)

    def _loop_steps(self) -> None:
        """Until the thread shall end. What a step gave crosses with the answers of the commands that follow it."""
        events: list[E] = []
        while True:
            answers: list[_Answer] = []
            try:
                goes_on = self._run_commands(answers)
            finally:
                self._cross(events, answers)
            if not goes_on:
                return
            events = self._stepper.step(self._clock())
            wait_s = self._stepper.next_wakeup(self._clock())
            if wait_s != 0 and not self._commands:
                self._cross(events, [])
                events = []
                self._wait(wait_s)

    def _cross(self, events: list[E], answers: "list[_Answer]") -> None:
        if events or answers:
            call_on_loop(self._loop, self._arrive, events, answers)

    def _arrive(self, events: list[E], answers: "list[_Answer]") -> None:
        """On the event loop."""
        try:
            if events:
                self._deliver(events)
        finally:
            _settle(answers)

    def _wait(self, seconds: float | None) -> None:
        with self._wake:
            if not self._commands and not self._stopping:
                self._idle_until = math.inf if seconds is None else self._clock() + seconds
                self._wake.wait(seconds)
                self._idle_until = -math.inf

    def _run_commands(self, answers: "list[_Answer]") -> bool:
        """False: the thread shall end."""
        self._num_turns += 1
        with self._wake:
            num_commands = len(self._commands)
            stopping = self._stopping
        for _ in range(num_commands):
            self._run(self._commands.popleft(), answers)
        return not stopping

    def _run(self, command: _Command, answers: "list[_Answer]") -> None:
        self._num_turns += 1
        if command.result is None:
            command.run()
            return
        try:
            answers.append((command.result, command.run(), None))
        except Exception as error:
            answers.append((command.result, None, error))

    def _end(self, failure: BaseException | None, answers: "list[_Answer]") -> None:
        _settle(answers)
        if failure is not None:
            self.failed.set_result(failure)
        self._ended.set()


_Answer = tuple["asyncio.Future[Any]", object, Exception | None]


def _settle(answers: list[_Answer]) -> None:
    for result, value, error in answers:
        if result.done():  # the caller has gone
            continue
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)


def _name_thread(name: str) -> None:
    """Let `top -H` and debuggers show the current thread's name, which Python keeps to itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def _stopped() -> UnavailableError:
    return UnavailableError("the engine has stopped", reason="ENGINE_STOPPED")


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[*Arguments], object], *arguments: *Arguments
) -> None:
    """Run the callback on the loop, soon, from any thread; nothing happens once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
