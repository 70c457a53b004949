"""Networks between services that do what networks do: pass bytes on late, slowly, for a while not at all, or break off.

The proxies run on one thread of their own, beside whatever loop a test has.
"""

import asyncio
import contextlib
import functools
import math
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

T = TypeVar("T")
_CHUNK_BYTES = 65536
_MAX_CHUNKS = 256  # on their way, in one direction of a connection
_TURNS_TO_SERVE = 5  # of the loop, from a connection's acceptance until it is known here
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class _Loop:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="links", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@functools.cache
def _loop() -> _Loop:
    return _Loop()


def hold_port(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """Keep a port from being given to anyone but who asks for it by number; listening there stays possible."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, port))
    return holder


@dataclass(eq=False)
class TcpLink:
    """Connections to `address` reach `target`; use it as a context. Settings apply to what is sent from then on."""

    target: str  # host:port
    delay_s: float = 0.0  # each way
    bytes_per_s: float = math.inf  # each way and connection
    num_connections: int = 0  # so far
    num_bytes: int = 0  # both ways, so far
    _holder: socket.socket = field(default_factory=hold_port)
    _connections: set["asyncio.Task[Any]"] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _passing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int:
        return int(self._holder.getsockname()[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def black_hole(self) -> None:
        """From now on nothing arrives, and nobody is told: connections, old and new, stay open."""
        _loop().loop.call_soon_threadsafe(self._passing.clear)

    def cut(self) -> None:
        """Reset all connections, and refuse new ones."""
        _loop().run(self._stop())

    def heal(self) -> None:
        """All passes again; what a black hole held arrives now, as it would by retransmission."""
        self.delay_s, self.bytes_per_s = 0.0, math.inf
        _loop().run(self._start())

    def __enter__(self) -> Self:
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._holder.close()

    async def _start(self) -> None:
        self._passing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _stop(self) -> None:
        if self._server is not None:
            # What is accepted, and not served yet, would be lost in a server that is closed, and not be cut.
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(_TURNS_TO_SERVE):
                await asyncio.sleep(0)
            self._server.close()
            self._server = None
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        self.num_connections += 1
        writers = [writer]
        try:
            await self._passing.wait()
            host, _, port = self.target.rpartition(":")
            back, away = await asyncio.open_connection(host, int(port))
            writers.append(away)
            async with asyncio.TaskGroup() as directions:
                self._pass_on(directions, reader, away)
                self._pass_on(directions, back, writer)
        except* (OSError, asyncio.CancelledError):  # one side broke, or isn't there: so does the other
            for end in writers:
                _reset_at_close(end)
        finally:
            for end in writers:
                end.close()

    def _pass_on(self, tasks: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction of a connection, until its end; what comes is sent when it is due."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)

        async def take() -> None:
            data = b"any"
            while data:
                data = await reader.read(_CHUNK_BYTES)
                await chunks.put((loop.time() + self.delay_s, data))

        async def give() -> None:
            while True:
                due, data = await chunks.get()
                await asyncio.sleep(due - loop.time())
                await self._passing.wait()
                if not data:
                    writer.write_eof()
                    return
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(len(data) / self.bytes_per_s)

        tasks.create_task(take())
        tasks.create_task(give())


def _reset_at_close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
    writer.transport.abort()
