"""Health that is true: a worker serves only while its engine gets on, which is watched from the event loop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from pageferry.core.errors import UnavailableError
from pageferry.runtime.logs import log
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.watchdog import Sign, Watchdog


class Watched(Protocol):
    """An engine's thread."""

    def sign(self) -> Sign: ...


async def keep_health_true(engine: Watched, server: GrpcServer, publisher: Publisher, stall_s: float) -> None:
    """Until cancelled: where the engine stalls, health says so, new work is refused, and routers are told."""
    watchdog = Watchdog(stall_s)
    async for stalled in _changes(engine, watchdog):
        if stalled:
            log("engine_stalled", level="error", silent_s=round(watchdog.silent_s, 1))
        else:
            log("engine_moves_again")
        publisher.set_stalled(stalled)
        await server.set_alive(not stalled)
        await server.set_serving(not stalled, refusal=_stalled if stalled else None)


async def _changes(engine: Watched, watchdog: Watchdog) -> AsyncIterator[bool]:
    """Whether it is stalled, at each change; at first it is not."""
    loop = asyncio.get_running_loop()
    last, stalled = loop.time(), False
    while True:
        await asyncio.sleep(watchdog.look_s)
        now = loop.time()
        watchdog.look(engine.sign(), now - last)
        last = now
        if watchdog.stalled != stalled:
            stalled = watchdog.stalled
            yield stalled


def _stalled() -> UnavailableError:
    return UnavailableError("the worker's engine makes no progress", reason="ENGINE_STALLED", nothing_begun=True)
