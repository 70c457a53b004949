"""What can go wrong. Each fault is undone by itself after its time; the simulation waits for that."""

from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import replace
from random import Random

from sim.network import Connection, Frame, Kind, Link
from sim.nodes import Node
from sim.process import Life, Process
from sim.workers import WorkerNode
from sim.world import World, is_dead

SLOW_S = 0.3  # that a message takes


def undo_later(world: World, seconds: float, undo: Callable[[], object]) -> None:
    def run() -> None:
        world.num_pending -= 1
        undo()

    world.num_pending += 1
    world.loop.call_later(seconds, run, context=Context())


def kill(world: World, node: Node, seconds: float) -> None:
    """And start another process on its address after so long."""
    if is_dead(node):
        return
    node.kill()
    process = node.process
    undo_later(world, seconds, lambda: node.start() if node.process is process else None)


def drain(world: World, node: Node, seconds: float) -> None:
    """SIGTERM; another process starts on its address so long after that, or once it has ended."""
    process = node.process

    def start() -> None:
        if process.life is not Life.DEAD:
            undo_later(world, 1.0, start)
        elif node.process is process:  # else it was killed, and is there again
            node.start()

    if node.is_up and node.is_started and not node.is_draining:
        node.drain()
        undo_later(world, seconds, start)


def pause(world: World, process: Process, seconds: float) -> None:
    """SIGSTOP."""

    def resume() -> None:
        process.resume()
        world.network.flush()

    if process.life is Life.UP:
        process.pause()
        undo_later(world, seconds, resume)


def hang(world: World, node: Node, seconds: float) -> None:
    """Its engine makes no step; its event loop lives on."""
    assert isinstance(node, WorkerNode)
    if node.is_started and not node.engine.is_frozen:
        engine = node.engine
        engine.is_frozen = True
        undo_later(world, seconds, engine.thaw)


def fill(world: World, node: Node, seconds: float) -> None:
    """All pages that it has left are somebody else's."""
    assert isinstance(node, WorkerNode)
    if not node.is_started:
        return
    taken = [(pool, pool.allocate(pool.num_available) or []) for pool in node.pools.groups]

    def give_back() -> None:
        for pool, pages in taken:
            pool.release(pages)

    undo_later(world, seconds, give_back)


def reset(connections: Iterable[Connection]) -> None:
    for connection in connections:
        connection.cut("Connection reset by peer")


def black_hole(world: World, links: Iterable[Link], seconds: float) -> None:
    """What is sent goes nowhere, and nobody is told."""
    broken = list(links)

    def heal() -> None:
        for link in broken:
            link.is_black_hole = False
        world.network.flush()

    for link in broken:
        link.is_black_hole = True
    undo_later(world, seconds, heal)


def slow(world: World, links: Iterable[Link], seconds: float) -> None:
    slowed = list(links)

    def heal() -> None:
        for link in slowed:
            link.delay_s = 0.0

    for link in slowed:
        link.delay_s = SLOW_S
    undo_later(world, seconds, heal)


# Of a push's messages: one is changed on its way.


def _flipped(frame: Frame, rng: Random) -> list[Frame]:
    data = bytearray(frame.payload)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [replace(frame, payload=bytes(data))]


def _truncated(frame: Frame, rng: Random) -> list[Frame]:
    return [replace(frame, payload=frame.payload[: rng.randrange(len(frame.payload))])]


SWAPPED = "swapped with the next"
_CHANGES: dict[str, Callable[[Frame, Random], list[Frame]]] = {
    "dropped": lambda frame, rng: [],
    "sent twice": lambda frame, rng: [frame, replace(frame)],
    "a bit flipped": _flipped,
    "cut short": _truncated,
}
CHANGES = (*_CHANGES, SWAPPED)


def tamper_once(link: Link, change: str, rng: Random, wanted: Callable[[Frame], bool]) -> None:
    """Change the link's next push message that is wanted."""
    kept: list[Frame] = []

    def tamper(frame: Frame, to_server: bool) -> list[Frame]:
        if kept and to_server and frame.stream == kept[0].stream:
            link.tamper = None
            return [frame, *kept]
        is_push = to_server and frame.method.endswith("/Push") and frame.kind is Kind.MESSAGE
        if kept or not is_push or not wanted(frame):
            return [frame]
        if change == SWAPPED:
            kept.append(frame)
            return []
        link.tamper = None
        return _CHANGES[change](frame, rng)

    link.tamper = tamper
