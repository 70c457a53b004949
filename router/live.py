"""The requests that are not over, and the wait for their end when the router drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.runtime.logs import log


class Live(Protocol):
    """A request whose answers are on their way."""

    @property
    def num_live(self) -> int: ...

    def end(self, error: PageferryError) -> None: ...


def draining_error() -> UnavailableError:
    """For what comes too late: another router can take it."""
    return UnavailableError("the router is draining", reason="DRAINING", nothing_begun=True)


class LiveRequests:
    """By the id that workers know them by; `drains` is set once no more should come."""

    def __init__(self) -> None:
        self.drains = asyncio.Event()
        self._num_coming = 0
        self._requests: dict[str, Live] = {}
        self._changed = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self.drains.is_set()

    def __len__(self) -> int:
        return self._num_coming + len(self._requests)

    @property
    def num_answers(self) -> int:
        """Answers to them that wait for workers or run, and requests that are looked at."""
        return self._num_coming + sum(request.num_live for request in self._requests.values())

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._requests

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A request is looked at inside the block: a drain waits for it. UnavailableError once one has begun."""
        if self.draining:
            raise draining_error()
        with self.looked_at():
            yield

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """The same of one that is looked at during a drain, too."""
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1
            self._changed.set()

    @contextmanager
    def hold(self, work_id: str, request: Live) -> Iterator[None]:
        """A request is live inside the block."""
        self._requests[work_id] = request
        try:
            yield
        finally:
            del self._requests[work_id]
            self._changed.set()

    async def drain(self, grace_s: float) -> int:
        """Take nothing more, let live requests end, and end what still lives after `grace_s` with UnavailableError.

        Returns how many were ended.
        """
        self.drains.set()
        try:
            async with asyncio.timeout(grace_s):
                while len(self):
                    self._changed.clear()
                    await self._changed.wait()
            return 0
        except TimeoutError:
            pass
        overdue = list(self._requests.values())
        error = UnavailableError(f"the router drains, and its grace of {grace_s:g} s is over", reason="DRAINED")
        for request in overdue:
            request.end(error)
        log("requests_ended_by_drain", requests=len(overdue))
        return len(overdue)
