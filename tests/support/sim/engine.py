"""What a simulated worker has instead of threads and of a model."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fake_engine import VOCAB_SIZE, FakePages, FakeRunner

from pageferry.core.layout import CacheLayout
from pageferry.core.model_config import ModelConfig
from pageferry.core.plan import Plan, StepResult
from pageferry.runtime.engine_thread import EngineThread, _Answer, _Command, _stopped, call_on_loop
from pageferry.runtime.watchdog import Sign
from sim.process import Process

MODEL = ModelConfig(
    name="sim",
    architecture="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    num_layers=3,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_positions=4096,
    norm_eps=1e-5,
    rope_theta=1e4,
)
_COPY_S = (0.00005, 0.0005)
_TURN_S = (0.00001, 0.0002)


class StepClock:
    """The loop's time, and inside a step what it has taken so far."""

    def __init__(self, process: Process, rng: Random) -> None:
        self.process = process
        self.rng = rng
        self.ahead = 0.0
        self.total = 0.0  # seconds of all steps

    def __call__(self) -> float:
        return self.process.loop.time() + self.ahead

    def take(self) -> float:
        """The seconds of the step that is over."""
        ahead, self.ahead = self.ahead, 0.0
        self.total += ahead
        return ahead


@dataclass(slots=True)
class TimedRunner(FakeRunner):
    """The fake model, which takes its time."""

    clock: StepClock = field(kw_only=True)
    step_s: float = 0.002
    token_s: float = 0.001

    def run(self, plan: Plan) -> StepResult:
        result = FakeRunner.run(self, plan)
        self.clock.ahead += (self.step_s + self.token_s * plan.num_tokens) * self.clock.rng.uniform(0.8, 1.2)
        return result


@dataclass
class SimModel:
    """As `load_engine` makes one."""

    layout: CacheLayout
    num_pages: tuple[int, ...]
    num_tails: int
    pages: FakePages
    runner: TimedRunner
    model_config: ModelConfig = MODEL
    memory_report: dict[str, int] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Nothing is cold."""


def make_model(layout: CacheLayout, num_pages: int, num_tails: int, clock: StepClock) -> SimModel:
    pages = FakePages(layout, num_pages, num_tails)
    return SimModel(layout, (num_pages,) * len(layout.groups), num_tails, pages, TimedRunner(pages=pages, clock=clock))


class SimExecutor:
    """The transfer thread: one thing after the other, each a moment after it was asked for."""

    def __init__(self, process: Process, rng: Random) -> None:
        self._process = process
        self._rng = rng
        self._free_at = 0.0

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        loop = self._process.loop
        self._free_at = max(self._free_at, loop.time()) + self._rng.uniform(*_COPY_S)

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._process.later(self._free_at - loop.time(), run)
        return future

    def shutdown(self, wait: bool = True) -> None:
        """What was asked for is still done."""


class SimEngine(EngineThread[Any]):
    """Steps as callbacks of the loop, with what a thread promises: see EngineThread.

    While `is_frozen` it does nothing, as one that hangs in a call.
    """

    _clock: StepClock

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed = self._loop.create_future()
        self._ended = asyncio.Event()
        self.is_frozen = self._is_due = False
        self._events: list[Any] = []
        self._sleeping: asyncio.TimerHandle | None = None
        self._after(0.0, self._turn)

    async def stop(self) -> None:
        self._stopping = True
        self._wake_up()
        await self._ended.wait()

    def thaw(self) -> None:
        self.is_frozen = False
        if self._is_due:
            self._turn()

    def sign(self) -> Sign:
        return replace(super().sign(), cpu_s=self._clock.total)

    def _put(self, command: _Command) -> None:
        super()._put(command)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._sleeping is not None:
            self._idle_until = -math.inf
            self._sleeping.cancel()
            self._sleeping = None
            self._after(0.0, self._turn)

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        clock = self._clock
        clock.process.later(seconds + clock.rng.uniform(*_TURN_S), function)

    def _turn(self) -> None:
        self._is_due = self.is_frozen
        if self.is_frozen:
            return
        answers: list[_Answer] = []
        try:
            try:
                goes_on = self._run_commands(answers)
            finally:
                self._cross(self._events, answers)
                self._events = []
            if not goes_on:
                self._over(None)
                return
            self._events = self._stepper.step(self._clock())
        except BaseException as error:
            self._over(error)
            return
        self._after(self._clock.take(), self._rest)

    def _rest(self) -> None:
        wait_s = self._stepper.next_wakeup(self._clock())
        if wait_s == 0 or self._commands or self._stopping:
            self._turn()
            return
        self._cross(self._events, [])
        self._events = []
        assert wait_s is not None, "workers report at times, whatever happens"
        self._idle_until = self._clock() + wait_s
        self._sleeping = self._clock.process.later(wait_s, self._wake_up)

    def _over(self, failure: BaseException | None) -> None:
        self._closed = True
        left = [command.result for command in self._commands if command.result is not None]
        call_on_loop(self._loop, self._end, failure, [(result, None, _stopped()) for result in left])
