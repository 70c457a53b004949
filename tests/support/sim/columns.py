"""The faults of the matrix: each strikes one victim, which is a node's name, or the client."""

from collections.abc import Callable
from dataclasses import dataclass

from sim import faults
from sim.network import Link
from sim.nodes import Node
from sim.process import Process
from sim.world import Request, World

SHORT_S, LONG_S = 2.0, 45.0
_GONE_S = 15.0  # until a killed one is there again: longer than anybody waits for it
_RESTART_S = 0.5
_FULL_S = 1.0
_SLOW_FOR_S = 10.0


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


@dataclass(frozen=True)
class Fault:
    name: str
    what: str  # in a sentence
    strike: Callable[[Target], None]


def _kill(target: Target) -> None:
    if target.name == "client":
        target.process.kill()
        target.world.network.died(target.process)
    else:
        faults.kill(target.world, target.node, _GONE_S)


def _cancel(target: Target) -> None:
    assert target.request.task is not None
    target.request.task.cancel()


def _paused(name: str, seconds: float) -> Fault:
    return Fault(name, f"stopped by SIGSTOP for {seconds:g} s", lambda t: faults.pause(t.world, t.process, seconds))


_KILL = Fault("killed", "the process is killed", _kill)
_WORKER_OR_ROUTER = (
    Fault(
        "restarted",
        f"it is killed, and there again on its address {_RESTART_S:g} s later",
        lambda t: faults.kill(t.world, t.node, _RESTART_S),
    ),
    Fault("SIGTERM", "it is told to end in good order", lambda t: faults.drain(t.world, t.node, _GONE_S)),
)
_WORKER = (
    Fault(
        "engine hangs",
        f"its engine makes no step for {LONG_S:g} s, while its event loop lives",
        lambda t: faults.hang(t.world, t.node, LONG_S),
    ),
    Fault(
        "full",
        f"all pages that it has left are somebody else's for {_FULL_S:g} s",
        lambda t: faults.fill(t.world, t.node, _FULL_S),
    ),
)
_ANY = (
    _paused("paused", SHORT_S),
    _paused("frozen", LONG_S),
    Fault(
        "connections reset",
        "all connections from and to it are reset, and new ones can be made",
        lambda t: faults.reset(t.world.network.of(t.name)),
    ),
    Fault(
        "unreachable",
        f"packets from and to it go nowhere for {LONG_S:g} s, and nobody is told",
        lambda t: faults.black_hole(t.world, t.links, LONG_S),
    ),
    Fault(
        "slow",
        f"each message from and to it takes {faults.SLOW_S:g} s for {_SLOW_FOR_S:g} s",
        lambda t: faults.slow(t.world, t.links, _SLOW_FOR_S),
    ),
)
_CANCEL = Fault("cancels", "the client cancels its call", _cancel)
DEADLINE = Fault("deadline", "the request's deadline passes", lambda t: None)

VICTIMS = {
    "prefill": (_KILL, *_WORKER_OR_ROUTER, *_WORKER, *_ANY),
    "decode": (_KILL, *_WORKER_OR_ROUTER, *_WORKER, *_ANY),
    "router": (_KILL, *_WORKER_OR_ROUTER, *_ANY),
    "client": (_CANCEL, DEADLINE, _KILL, *_ANY),
}
