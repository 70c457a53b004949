"""The engine's thread: order of commands, events and results, and what its end does."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.runtime import engine_thread
from pageferry.runtime.engine_thread import EngineThread


class FakeStepper:
    """Steps while it has work; each step returns one event."""

    def __init__(self) -> None:
        self.work: list[Callable[[], str]] = []
        self.threads: set[int] = set()
        self.wakeup: float | None = None

    def add(self, work: Callable[[], str]) -> int:
        self.threads.add(threading.get_ident())
        self.work.append(work)
        return len(self.work)

    def step(self, now: float) -> list[str]:
        self.threads.add(threading.get_ident())
        return [self.work.pop(0)()] if self.work else []

    def next_wakeup(self, now: float) -> float | None:
        return 0 if self.work else self.wakeup


class Recorder:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.deliveries = 0
        self._more = asyncio.Event()

    def deliver(self, events: list[str]) -> None:
        self.deliveries += 1
        self.log.extend(events)
        self._more.set()

    async def wait(self, event: str) -> None:
        async with asyncio.timeout(60):
            while event not in self.log:
                self._more.clear()
                await self._more.wait()

    def note(self, event: str) -> None:
        self.log.append(event)
        self._more.set()


async def test_a_steps_events_are_delivered_before_a_later_commands_result() -> None:
    stepper, recorder = FakeStepper(), Recorder()
    engine = EngineThread(stepper, recorder.deliver, name="engine")
    engine.start()
    for name in ("a", "b", "c"):
        entered, release = threading.Event(), threading.Event()

        def work(name: str = name, entered: threading.Event = entered, release: threading.Event = release) -> str:
            entered.set()
            release.wait(60)
            return f"step {name}"

        await engine.call(lambda work=work: stepper.add(work))  # type: ignore[misc]
        entered.wait(60)
        later = asyncio.create_task(engine.call(lambda: None))
        later.add_done_callback(lambda _, name=name: recorder.note(f"result {name}"))  # type: ignore[misc]
        await asyncio.sleep(0)
        release.set()
        await recorder.wait(f"result {name}")
    await engine.stop()

    assert recorder.log == [f"{what} {name}" for name in ("a", "b", "c") for what in ("step", "result")]
    assert recorder.deliveries == 3, "one crossing a step"
    assert len(stepper.threads) == 1
    assert threading.get_ident() not in stepper.threads


async def test_commands_run_before_the_next_step_in_the_order_given() -> None:
    stepper, recorder = FakeStepper(), Recorder()
    engine = EngineThread(stepper, recorder.deliver, name="engine")
    engine.start()
    release = threading.Event()

    def hold() -> str:
        release.wait(60)
        return "held"

    order: list[int] = []
    await engine.call(lambda: stepper.add(hold))
    for number in range(3):
        engine.post(lambda number=number: order.append(number))  # type: ignore[misc]
    engine.post(lambda: stepper.add(lambda: f"saw {order}"))
    release.set()
    await recorder.wait("saw [0, 1, 2]")
    await engine.stop()


async def test_a_call_raises_what_its_command_raised_and_the_thread_goes_on() -> None:
    engine = EngineThread(FakeStepper(), Recorder().deliver, name="engine")
    engine.start()

    def refuse() -> None:
        raise InvalidArgumentError("no")

    with pytest.raises(InvalidArgumentError, match="no"):
        await engine.call(refuse)
    assert await engine.call(lambda: 7) == 7
    await engine.stop()


async def test_a_command_of_a_caller_that_has_gone_still_runs() -> None:
    engine = EngineThread(FakeStepper(), Recorder().deliver, name="engine")
    engine.start()
    release, ran = threading.Event(), []
    engine.post(lambda: release.wait(60))
    caller = asyncio.create_task(engine.call(lambda: ran.append(1)))
    await asyncio.sleep(0)
    caller.cancel()
    release.set()
    assert await engine.call(lambda: ran) == [1]
    await engine.stop()


async def test_a_step_that_raises_ends_the_thread_and_all_that_wait_for_it() -> None:
    stepper = FakeStepper()
    engine = EngineThread(stepper, Recorder().deliver, name="engine")
    engine.start()
    release = threading.Event()

    def fail() -> str:
        release.wait(60)
        raise ValueError("broken")

    await engine.call(lambda: stepper.add(fail))
    waiting = asyncio.create_task(engine.call(lambda: 1))
    await asyncio.sleep(0)
    release.set()
    assert repr(await engine.failed) == "ValueError('broken')"
    with pytest.raises(UnavailableError, match="the engine has stopped"):
        await waiting
    engine.post(lambda: None)  # changes nothing any more
    with pytest.raises(UnavailableError):
        await engine.call(lambda: None)
    await engine.stop()


async def test_a_posted_command_that_raises_ends_the_thread_and_those_after_it_are_refused() -> None:
    engine = EngineThread(FakeStepper(), Recorder().deliver, name="engine")
    engine.start()
    release = threading.Event()
    engine.post(lambda: release.wait(60))
    engine.post(lambda: 1 // 0)
    after = asyncio.create_task(engine.call(lambda: 1))
    await asyncio.sleep(0)
    release.set()
    assert isinstance(await engine.failed, ZeroDivisionError)
    with pytest.raises(UnavailableError):
        await after


async def test_stop_runs_the_commands_given_before_it() -> None:
    engine = EngineThread(FakeStepper(), Recorder().deliver, name="engine")
    engine.start()
    ran: list[int] = []
    engine.post(lambda: ran.append(1))
    await engine.stop()
    assert ran == [1]
    assert not engine.failed.done()
    engine.post(lambda: ran.append(2))
    with pytest.raises(UnavailableError):
        await engine.call(lambda: ran.append(3))
    await engine.stop()
    assert ran == [1]


async def test_a_timed_wakeup_steps_without_a_command() -> None:
    recorder = Recorder()
    stepper = FakeStepper()
    stepper.wakeup = 0.001
    engine = EngineThread(stepper, recorder.deliver, name="engine")
    engine.start()
    stepper.work.append(lambda: "woken")
    await recorder.wait("woken")
    await engine.stop()


class CountedLoop:
    """Counts the crossings to the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_crossings = 0

        def count(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
            self.num_crossings += 1
            loop.call_soon_threadsafe(callback, *arguments)

        monkeypatch.setattr(engine_thread, "call_on_loop", count)


async def test_a_steps_events_and_the_answers_of_commands_after_it_cross_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, stepper, recorder = CountedLoop(monkeypatch), FakeStepper(), Recorder()
    engine = EngineThread(stepper, recorder.deliver, name="engine")
    engine.start()
    entered, release = threading.Event(), threading.Event()

    def hold() -> str:
        entered.set()
        release.wait(60)
        return "first"

    await engine.call(lambda: [stepper.add(hold), stepper.add(lambda: "second")])
    entered.wait(60)
    before = counted.num_crossings
    calls = [asyncio.create_task(engine.call(lambda number=number: number)) for number in range(5)]  # type: ignore[misc]
    for call in calls:
        call.add_done_callback(lambda call: recorder.note(f"answer {call.result()}"))
    await asyncio.sleep(0)
    release.set()
    await recorder.wait("second")
    await recorder.wait("answer 4")
    assert recorder.log[0] == "first"
    assert counted.num_crossings - before == 2, "one a step"
    await engine.stop()


async def test_an_idle_thread_neither_steps_nor_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, stepper = CountedLoop(monkeypatch), FakeStepper()
    steps: list[float] = []
    engine = EngineThread(stepper, Recorder().deliver, name="engine", clock=lambda: float(len(steps)))
    monkeypatch.setattr(stepper, "step", lambda now: steps.append(now) or [])
    engine.start()
    for number in range(1, 4):
        assert await engine.call(lambda: len(steps)) <= number
    await engine.stop()
    assert len(steps) <= 4
    assert counted.num_crossings == 4, "three answers and the end"
