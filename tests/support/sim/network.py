"""Connections between simulated processes: frames in order, with delays, over links that can be broken in many ways."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any, Protocol

from pageferry.runtime.channels import CHANNEL_OPTIONS, KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from sim.loop import VirtualLoop
from sim.process import Life, Process

WINDOW_BYTES = 65_536  # of a stream that its reader has not read
CONNECT_TIMEOUT_S = int(dict(CHANNEL_OPTIONS)["grpc.min_reconnect_backoff_ms"]) / 1000
FIRST_BACKOFF_S = int(dict(CHANNEL_OPTIONS)["grpc.initial_reconnect_backoff_ms"]) / 1000
LONGEST_BACKOFF_S = int(dict(CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"]) / 1000
_LATENCY_S = (0.0001, 0.0006)
_NOBODY = Context()  # what is on its way is no process's


class Kind(Enum):
    CALL = "call"  # with the first message, where the client sends but one
    MESSAGE = "message"
    HALF_CLOSE = "half close"
    STATUS = "status"
    RESET = "reset"  # of a stream: the caller has left
    PING = "ping"
    PONG = "pong"
    CLOSE = "close"  # of the connection


@dataclass(slots=True)
class Frame:
    """`payload` is a message's bytes; of a status its code, details and metadata."""

    kind: Kind
    stream: int = 0
    method: str = ""
    payload: Any = None


@dataclass(slots=True)
class Sight:
    """What an observer sees of a frame: when it is sent, and again when it arrives."""

    source: str
    target: str
    frame: Frame
    to_server: bool
    has_arrived: bool


@dataclass
class Link:
    """Between two nodes, both ways. `tamper` gets each frame when it is sent, and returns what is sent instead."""

    delay_s: float = 0.0
    is_black_hole: bool = False  # nothing gets through, and nobody is told
    tamper: Callable[[Frame, bool], list[Frame]] | None = None  # frame, whether it goes to the server


class Door(Protocol):
    """A port where connections are taken."""

    process: Process

    def accept(self, connection: "Connection") -> "End": ...


class End(Protocol):
    """A side of a connection: what gets its frames."""

    process: Process

    def take(self, frame: Frame) -> None: ...

    def lost(self, why: str) -> None: ...


@dataclass
class _Side:
    end: End
    is_open: bool = True
    last_heard: float = 0.0
    queue: deque[tuple[float, Frame]] = field(default_factory=deque)  # on their way to it
    is_held: bool = False  # the first of them is due, and can't get through


class Connection:
    """One HTTP/2 connection, between a channel (side 0) and a server (side 1)."""

    def __init__(self, network: "Network", names: tuple[str, str], client: End, door: Door) -> None:
        self.names = names
        self._network = network
        self._loop = network.loop
        self._unread: Counter[tuple[int, bool]] = Counter()  # bytes, by stream and direction
        self._read = asyncio.Event()
        now = self._loop.time()
        self._sides = (_Side(client, last_heard=now), _Side(door.accept(self), last_heard=now))
        for index, side in enumerate(self._sides):
            side.end.process.later(KEEPALIVE_MS / 1000, self._keep_alive, index)

    @property
    def is_open(self) -> bool:
        """As the client knows."""
        return self._sides[0].is_open

    def send(self, frame: Frame, *, to_server: bool) -> None:
        if not self._sides[1 - to_server].is_open:
            return
        link = self._network.link(*self.names)
        frames = link.tamper(frame, to_server) if link.tamper is not None else [frame]
        for sent in frames:
            self._network.see(Sight(*self._ends(to_server), sent, to_server, has_arrived=False))
            queue = self._sides[to_server].queue
            due = self._loop.time() + self._network.rng.uniform(*_LATENCY_S) + link.delay_s
            due = max(due, queue[-1][0]) if queue else due
            queue.append((due, sent))
            self._loop.call_at(due, self._deliver, int(to_server), context=_NOBODY)

    async def room(self, stream: int, *, to_server: bool) -> None:
        """Until what the stream's reader has not read is less than its window, or the stream is over."""
        while self._unread[stream, to_server] >= WINDOW_BYTES:
            self._read.clear()
            await self._read.wait()

    def count(self, stream: int, num_bytes: int, *, to_server: bool) -> None:
        """Bytes that were sent, or (negative) that were read."""
        self._unread[stream, to_server] += num_bytes
        if num_bytes < 0:
            self._read.set()

    def forget(self, stream: int, *, to_server: bool) -> None:
        """The reader reads no more, so that nobody waits for it."""
        self._unread.pop((stream, to_server), None)
        self._read.set()

    def close(self, side: int, why: str) -> None:
        """One side ends the connection; the other hears of it, if it can."""
        if self._sides[side].is_open:
            self.send(Frame(Kind.CLOSE, payload=why), to_server=side == 0)
            self._lose(side, why)

    def cut(self, why: str) -> None:
        """Both sides hear at once that the connection is no more."""
        for side in (0, 1):
            self._sides[side].queue.clear()
            if self._sides[side].is_open:
                self._lose(side, why)

    def flush(self) -> None:
        """Deliver what was held up, as far as it now gets through."""
        for index, side in enumerate(self._sides):
            if side.is_held:
                side.is_held = False
                self._loop.call_soon(self._deliver, index, context=_NOBODY)

    def _ends(self, to_server: bool) -> tuple[str, str]:
        return self.names if to_server else (self.names[1], self.names[0])

    def _deliver(self, index: int) -> None:
        side = self._sides[index]
        while side.queue and side.queue[0][0] <= self._loop.time():
            if side.end.process.life is not Life.UP or self._network.link(*self.names).is_black_hole:
                side.is_held = True
                return
            _, frame = side.queue.popleft()
            if side.is_open:
                self._take(index, frame)

    def _take(self, index: int, frame: Frame) -> None:
        side = self._sides[index]
        side.last_heard = self._loop.time()
        match frame.kind:
            case Kind.PING:
                self.send(Frame(Kind.PONG), to_server=index == 0)
            case Kind.PONG:
                pass
            case Kind.CLOSE:
                self._lose(index, frame.payload)
            case _:
                side.end.take(frame)
                self._network.see(Sight(*self._ends(index == 1), frame, index == 1, has_arrived=True))

    def _lose(self, index: int, why: str) -> None:
        self._sides[index].is_open = False
        self._sides[index].end.lost(why)
        if not any(side.is_open for side in self._sides):
            self._network.connections.pop(self, None)

    def _keep_alive(self, index: int) -> None:
        side = self._sides[index]
        if not side.is_open:
            return
        silent_s = self._loop.time() - side.last_heard
        if silent_s >= (KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / 1000:
            self.close(index, "keepalive watchdog timeout")
        elif silent_s >= KEEPALIVE_MS / 1000:
            self.send(Frame(Kind.PING), to_server=index == 0)
            side.end.process.later(KEEPALIVE_TIMEOUT_MS / 1000, self._keep_alive, index)
        else:
            side.end.process.later(KEEPALIVE_MS / 1000 - silent_s + 0.001, self._keep_alive, index)


class Network:
    """Who listens where, all connections, and the links under them."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop = loop
        self.rng = rng
        self.servers: dict[str, Door] = {}  # by address, which is the node's name and a port
        self.connections: dict[Connection, None] = {}
        self.observers: list[Callable[[Sight], None]] = []
        self.streams = itertools.count(1)
        self._links: dict[frozenset[str], Link] = {}

    def link(self, one: str, other: str) -> Link:
        return self._links.setdefault(frozenset((one, other)), Link())

    def links_of(self, name: str, others: list[str]) -> list[Link]:
        return [self.link(name, other) for other in others if other != name]

    def see(self, sight: Sight) -> None:
        for observe in list(self.observers):
            observe(sight)

    def can_reach(self, name: str, address: str) -> Door | None:
        """Who answers there now; None where nobody does, and nobody refuses. ConnectionError where one refuses."""
        server = self.servers.get(address)
        if self.link(name, address.partition(":")[0]).is_black_hole:
            return None
        if server is None or server.process.life is Life.DEAD:
            raise ConnectionRefusedError(address)
        return server if server.process.life is Life.UP else None

    def connect(self, name: str, address: str, client: End, door: Door) -> Connection:
        connection = Connection(self, (name, address.partition(":")[0]), client, door)
        self.connections[connection] = None
        return connection

    def of(self, name: str) -> list[Connection]:
        """The connections that a node has."""
        return [connection for connection in self.connections if name in connection.names]

    def flush(self) -> None:
        for connection in list(self.connections):
            connection.flush()

    def died(self, process: Process) -> None:
        """The operating system closes what a killed process had open."""
        for connection in list(self.connections):
            for index, side in enumerate(connection._sides):
                if side.end.process is process:
                    connection.close(index, "Socket closed")
