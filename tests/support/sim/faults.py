"""What can go wrong, and how it is undone: each strikes one victim, which is a node's name, or the client."""

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from sim.loop import Process
from sim.network import Connection, Frame, Kind, Link
from sim.nodes import Node, WorkerNode
from sim.world import Request, World, is_dead

SHORT_S, LONG_S = 2.0, 45.0
_RESTART_S = 0.5
_SLOW_S, _SLOW_FOR_S = 0.3, 10.0


@dataclass(frozen=True)
class Target:
    """The victim: a node, or the client of the request."""

    world: World
    request: Request
    name: str

    @property
    def node(self) -> Node:
        return self.world.node(self.name)

    @property
    def process(self) -> Process:
        if self.name != "client":
            return self.node.process
        assert self.request.process is not None
        return self.request.process

    @property
    def links(self) -> list[Link]:
        return self.world.network.links_of(self.name, self.world.names)

    @property
    def connections(self) -> list[Connection]:
        return self.world.network.of(self.name)

    def later(self, seconds: float, function: Callable[[], Any]) -> None:
        self.world.loop.call_later(seconds, function, context=Context())


@dataclass(frozen=True)
class Fault:
    name: str
    what: str  # in a sentence
    strike: Callable[[Target], None]
    lasts_s: float = 0.0  # until it is undone by itself


def _kill(target: Target) -> None:
    if target.name == "client":
        target.process.kill()
        target.world.network.died(target.process)
    else:
        target.node.kill()


def _restart(target: Target) -> None:
    _kill(target)
    target.later(_RESTART_S, target.node.start)


def _paused(seconds: float) -> Callable[[Target], None]:
    def strike(target: Target) -> None:
        process = target.process

        def resume() -> None:
            process.resume()
            target.world.network.flush()

        process.pause()
        target.later(seconds, resume)

    return strike


def _hang(target: Target) -> None:
    assert isinstance(target.node, WorkerNode)
    engine = target.node.engine
    engine.is_frozen = True
    target.later(LONG_S, engine.thaw)


def _drain(target: Target) -> None:
    target.node.drain()


def _cut(target: Target) -> None:
    for connection in target.connections:
        connection.cut("Connection reset by peer")


def _black_hole(target: Target) -> None:
    def heal() -> None:
        for link in target.links:
            link.is_black_hole = False
        target.world.network.flush()

    for link in target.links:
        link.is_black_hole = True
    target.later(LONG_S, heal)


def _slow(target: Target) -> None:
    def heal() -> None:
        for link in target.links:
            link.delay_s = 0.0

    for link in target.links:
        link.delay_s = _SLOW_S
    target.later(_SLOW_FOR_S, heal)


def _cancel(target: Target) -> None:
    assert target.request.task is not None
    target.request.task.cancel()


KILL = Fault("killed", "the process is killed", _kill)
RESTART = Fault("restarted", f"killed, and there again on its address {_RESTART_S:g} s later", _restart)
PAUSE = Fault(f"stopped {SHORT_S:g} s", "stopped by SIGSTOP for so long", _paused(SHORT_S), SHORT_S)
FREEZE = Fault(f"stopped {LONG_S:g} s", "stopped by SIGSTOP for so long", _paused(LONG_S), LONG_S)
HANG = Fault(f"engine hangs {LONG_S:g} s", "its engine makes no step, while its event loop lives", _hang, LONG_S)
DRAIN = Fault("SIGTERM", "told to end in good order", _drain)
CUT = Fault("connections reset", "all connections from and to it are reset, and new ones can be made", _cut)
BLACK_HOLE = Fault(f"unreachable {LONG_S:g} s", "its packets go nowhere, and nobody is told", _black_hole, LONG_S)
SLOW = Fault(
    f"{_SLOW_S:g} s away", f"each message from and to it takes {_SLOW_S:g} s for {_SLOW_FOR_S:g} s", _slow, _SLOW_FOR_S
)
CANCEL = Fault("cancels", "the client cancels its call", _cancel)

WORKER_FAULTS = (KILL, RESTART, PAUSE, FREEZE, HANG, DRAIN, CUT, BLACK_HOLE, SLOW)
ROUTER_FAULTS = (KILL, RESTART, PAUSE, FREEZE, DRAIN, CUT, BLACK_HOLE, SLOW)
CLIENT_FAULTS = (CANCEL, KILL, PAUSE, FREEZE, CUT, BLACK_HOLE, SLOW)


def heal(target: Target) -> None:
    """Bring a node back that the fault has ended."""
    if target.name != "client" and is_dead(target.node):
        target.node.start()


# Of a push's messages: one is changed on its way.

Change = Callable[[Frame, Random], list[Frame]]


def _flipped(frame: Frame, rng: Random) -> list[Frame]:
    data = bytearray(frame.payload)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [replace(frame, payload=bytes(data))]


def _truncated(frame: Frame, rng: Random) -> list[Frame]:
    return [replace(frame, payload=frame.payload[: rng.randrange(len(frame.payload))])]


MESSAGE_CHANGES: dict[str, Change] = {
    "dropped": lambda frame, rng: [],
    "sent twice": lambda frame, rng: [frame, replace(frame)],
    "a bit flipped": _flipped,
    "cut short": _truncated,
}
SWAPPED = "swapped with the next"


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
        return MESSAGE_CHANGES[change](frame, rng)

    link.tamper = tamper
