"""What a router does between its start and its end: it tells whether it is ready, and drains."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pageferry.core.config import ServerConfig
from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend
from pageferry.runtime.logs import log
from pageferry.runtime.server import GrpcServer

_SERVER_DRAIN_S = 1.0  # for calls whose generation has ended already


@dataclass(frozen=True, slots=True)
class Running:
    """A gRPC server that has started, and what it offers. Beside it HTTP may be served, which drains with it."""

    config: ServerConfig
    server: GrpcServer
    frontend: Frontend
    fleet: Fleet

    async def until(
        self, stop: asyncio.Event, serve_http: Callable[[asyncio.Event], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Until `stop`, then drain; a part that fails ends all. `serve_http` is given the event that ends it."""
        http_stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as parts:
                readiness = parts.create_task(self._follow_readiness())
                if serve_http is not None:
                    parts.create_task(serve_http(http_stop))
                recording = parts.create_task(self.frontend.keep_record())
                self.fleet.start()
                await stop.wait()
                readiness.cancel()
                await self.drain()
                recording.cancel()
                http_stop.set()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def drain(self, grace_s: float | None = None) -> int:
        """Take nothing more and let live requests end, those over HTTP too; how many had to be ended."""
        grace_s = self.config.drain_grace_s if grace_s is None else grace_s
        await self.server.begin_drain(grace_s, self.frontend.num_live)
        # First what both servers share: afterwards neither has a generation to wait for.
        num_ended = await self.frontend.drain(grace_s)
        await self.server.drain(_SERVER_DRAIN_S)
        return num_ended

    async def _follow_readiness(self) -> None:
        """Keep the health service's answer true, and log its changes with the reasons."""
        changed = asyncio.Event()
        self.fleet.listeners.append(changed.set)
        was_ready = False
        while True:
            await changed.wait()
            changed.clear()
            if self.frontend.ready != was_ready:
                was_ready = self.frontend.ready
                await self.server.set_serving(was_ready)
                problems = {one.address: f"{one.state}: {one.reason}" for one in self.fleet.status() if one.reason}
                log("ready" if was_ready else "not_ready", level="info" if was_ready else "warning", unready=problems)
