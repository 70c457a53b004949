"""The simulator itself: its time, its processes and its network."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

import pytest
from sim.loop import START_S, StuckError, VirtualLoop
from sim.network import Connection, Frame, Kind, Network
from sim.process import Process


class Side:
    """Notes what gets to it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.frames: list[Any] = []
        self.lost_why = ""

    def accept(self, connection: Connection) -> "Side":
        return self

    def take(self, frame: Frame) -> None:
        self.frames.append(frame.payload)

    def lost(self, why: str) -> None:
        self.lost_why = why


class Pair:
    """Two processes and a connection."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.network = Network(self.loop, Random(0))
        self.client, self.server = (Side(Process(self.loop, name, self.network)) for name in ("c", "s"))
        self.connection = self.network.connect("c", "s:1", self.client, self.server)

    def send(self, *payloads: Any) -> None:
        for payload in payloads:
            self.connection.send(Frame(Kind.MESSAGE, 1, "m", payload), to_server=True)

    def wait(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as loop:
        yield loop


@pytest.fixture
def pair(loop: VirtualLoop) -> Pair:
    return Pair(loop)


def test_time_jumps(loop: VirtualLoop) -> None:
    began = time.monotonic()
    loop.run(asyncio.sleep(100_000))
    assert loop.time() == START_S + 100_000
    assert time.monotonic() - began < 10


def test_waiting_for_nothing_is_found_out(loop: VirtualLoop) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StuckError, match="nothing is left"):
        loop.run(wait())


def test_turning_for_ever_is_found_out(loop: VirtualLoop) -> None:
    async def turn() -> None:
        while True:  # noqa: ASYNC110 - what is to be found out
            await asyncio.sleep(0)

    with pytest.raises(StuckError, match="time stands still"):
        loop.run(turn())


@pytest.mark.parametrize("act", [lambda: threading.Thread(target=print).start(), lambda: time.sleep(0)])
def test_threads_and_real_waits_are_errors(loop: VirtualLoop, act: Any) -> None:
    async def main() -> None:
        act()

    with pytest.raises(AssertionError, match="a thread or a real wait"):
        loop.run(main())


def test_a_paused_process_goes_on_where_it_was(loop: VirtualLoop) -> None:
    process = Process(loop, "p", None)
    times: list[float] = []

    async def tick() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            times.append(loop.time() - START_S)

    async def main() -> None:
        task = process.spawn(tick())
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(5)
        process.resume()
        await task

    loop.run(main())
    assert times == [1.0, 6.5, 7.5]


def test_a_timeout_that_was_cancelled_while_paused_does_not_strike(loop: VirtualLoop) -> None:
    process = Process(loop, "p", None)
    event = asyncio.Event()

    async def wait() -> str:
        async with asyncio.timeout(1):
            await event.wait()
        await asyncio.sleep(1)
        return "in time"

    async def main() -> str:
        task = process.spawn(wait())
        await asyncio.sleep(0.5)
        process.pause()
        event.set()
        await asyncio.sleep(5)
        process.resume()
        return str(await task)

    assert loop.run(main()) == "in time"


def test_a_killed_process_does_nothing_more(loop: VirtualLoop) -> None:
    process = Process(loop, "p", None)
    ends: list[str] = []

    async def live() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            ends.append("ended")

    async def main() -> None:
        process.spawn(live())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(5)
        assert not ends
        await process.bury()

    loop.run(main())
    assert ends == ["ended"]


def test_frames_arrive_in_order_and_survive_their_sender(pair: Pair) -> None:
    pair.send(*range(20))
    pair.client.process.kill()
    pair.network.died(pair.client.process)
    pair.wait(1)
    assert (pair.server.frames, pair.server.lost_why) == (list(range(20)), "Socket closed")


def test_a_black_hole_holds_frames_until_it_is_gone(pair: Pair) -> None:
    link = pair.network.link("c", "s")
    link.is_black_hole = True
    pair.send(1, 2)
    pair.wait(5)
    assert not pair.server.frames
    link.is_black_hole = False
    pair.network.flush()
    pair.wait(1)
    assert pair.server.frames == [1, 2]


@pytest.mark.parametrize("is_paused", [False, True])
def test_keepalive_finds_a_silent_peer_out(pair: Pair, is_paused: bool) -> None:
    if is_paused:
        pair.server.process.pause()
    else:
        pair.network.link("c", "s").is_black_hole = True
    pair.wait(25)
    assert not pair.client.lost_why
    pair.wait(6)
    assert pair.client.lost_why == "keepalive watchdog timeout"
    assert bool(pair.server.lost_why) != is_paused


def test_an_idle_connection_lives_on(pair: Pair) -> None:
    pair.wait(500)
    assert not pair.client.lost_why and not pair.server.lost_why


def test_a_slow_reader_holds_its_writer_back(pair: Pair) -> None:

    async def main() -> None:
        pair.connection.count(1, 70_000, to_server=True)
        waiting = pair.loop.create_task(pair.connection.room(1, to_server=True))
        await asyncio.sleep(1)
        assert not waiting.done()
        pair.connection.count(1, -10_000, to_server=True)
        await waiting

    pair.loop.run(main())
