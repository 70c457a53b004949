"""The requests that are not over, and the wait for their end when the router drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pageferry.core.errors import UnavailableError
from pageferry.router.request import Generation
from pageferry.runtime.logs import log


class LiveRequests:
    """By the id that workers know them by; `draining` once no more should come."""

    def __init__(self) -> None:
        self.draining = False
        self._num_coming = 0
        self._generations: dict[str, Generation] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return self._num_coming + len(self._generations)

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._generations

    def get(self, work_id: str) -> Generation | None:
        return self._generations.get(work_id)

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A request is looked at inside the block: a drain waits for it. UnavailableError once one has begun."""
        if self.draining:
            raise UnavailableError("the router is draining", reason="DRAINING")
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1
            self._changed.set()

    @contextmanager
    def hold(self, work_id: str, generation: Generation) -> Iterator[None]:
        """A request is live inside the block."""
        self._generations[work_id] = generation
        try:
            yield
        finally:
            del self._generations[work_id]
            self._changed.set()

    async def drain(self, grace_s: float) -> int:
        """Take nothing more, let live requests end, and end what still lives after `grace_s` with UnavailableError.

        Returns how many were ended.
        """
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                while len(self):
                    self._changed.clear()
                    await self._changed.wait()
            return 0
        except TimeoutError:
            pass
        overdue = list(self._generations.values())
        error = UnavailableError(f"the router drains, and its grace of {grace_s:g} s is over", reason="DRAINED")
        for generation in overdue:
            generation.end(error)
        log("requests_ended_by_drain", requests=len(overdue))
        return len(overdue)
