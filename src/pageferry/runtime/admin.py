"""The AdminService: how operators take a service out of work, and see how far that is."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pageferry.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE = "pageferry.v1.AdminService"
_LOOK_S = 0.1  # how often the number of open calls is looked at, for whoever waits


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Runs on the event loop. `drain` takes the seconds of grace (None: the service's own setting), and may run twice.

    It returns how many calls it ended; until then `num_open` tells how many are open. `check` gets each call's context,
    and raises a PageferryError for a caller who may not call.
    """

    def __init__(
        self,
        drain: Callable[[float | None], Awaitable[int]],
        num_open: Callable[[], int],
        check: Callable[[Any], None] = lambda context: None,
    ) -> None:
        self._drain = drain
        self._num_open = num_open
        self._check = check
        self._drains: set[asyncio.Task[int]] = set()

    async def Drain(  # noqa: N802 - named by the contract
        self, request: admin_pb2.DrainRequest, context: Any
    ) -> AsyncIterator[admin_pb2.DrainResponse]:
        self._check(context)
        draining = self._begin(request.grace_ms / 1000 if request.HasField("grace_ms") else None)
        told: int | None = None
        while not draining.done():
            if (number := self._num_open()) != told:
                yield admin_pb2.DrainResponse(open_calls=number)
                told = number
            await asyncio.wait({draining}, timeout=_LOOK_S)
        yield admin_pb2.DrainResponse(
            open_calls=self._num_open(), drained=admin_pb2.Drained(ended_calls=draining.result())
        )

    def _begin(self, grace_s: float | None) -> asyncio.Task[int]:
        """A task of its own, so that it goes on where the caller leaves."""

        async def drain() -> int:
            return await self._drain(grace_s)

        task = asyncio.create_task(drain(), name="drain")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return task
