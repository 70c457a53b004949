"""Tickets as a receiver of pages knows them: the seam between Push streams and the service whose pages they fill."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pageferry.core.errors import PageferryError
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import SampledToken
from pageferry.runtime.frames import FrameKey


@dataclass(slots=True, eq=False)
class Grant:
    """The right to fill pages, which hold a reference of this push from `TicketDesk.open` to `TicketDesk.close`.

    `places` says where each page to receive goes. Where the desk ends the ticket on its own (expired, or its request
    is over), it calls `end`, on the event loop; the push then ends with that error.
    """

    ticket: bytes
    lease_ms: int
    places: Mapping[PageKey, Place] = field(default_factory=dict)
    ended: "asyncio.Future[PageferryError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: PageferryError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class TicketDesk(Protocol):
    """Who knows the tickets: the decode service, on its engine's thread. All methods are called on the event loop."""

    async def open(self, ticket: bytes, request_id: str, layout: CacheLayout) -> Grant:
        """Open the request's ticket and take a reference to each page of the grant. Or FailedPreconditionError."""
        ...

    def receive(self, grant: Grant, frames: Sequence[FrameKey]) -> None:
        """Frames lie in their pages (none: a keep-alive): record them and renew the lease. Does not wait."""
        ...

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        """All is there. FailedPreconditionError where it is not; then nothing has changed."""
        ...

    def close(self, grant: Grant, error: PageferryError | None) -> None:
        """The push is over and no copy runs any more: give the pages' references back, and abort the ticket if `error`.

        Called exactly once for each grant. Does not wait.
        """
        ...
