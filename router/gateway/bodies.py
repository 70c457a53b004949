"""Bodies of requests while their rest is awaited: bounded in size, each and together, and in time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.router.live import draining_error

BODY_S = 60.0  # for all of a body
MAX_BYTES = 256 * 2**20  # of all of them
_RETRY_AFTER_MS = 1000


class Bodies:
    """All that are on their way, over whichever protocol.

    Once they hold too much together, the one that began first makes room: whoever sends slowly goes, and those whose
    bodies come at once are served however many do so.
    """

    def __init__(
        self,
        max_body_bytes: int = 4 * 2**20,
        on_refused: Callable[[PageferryError], None] = lambda error: None,
    ) -> None:
        """`max_body_bytes` are those of one, which whoever reads it has to look at."""
        self.max_body_bytes = max_body_bytes
        self.num_bytes = 0
        self._on_refused = on_refused
        self._coming: set[Body] = set()
        self._held: dict[Body, None] = {}  # of them, in the order in which their first bytes came
        self._is_closed = False

    @asynccontextmanager
    async def receive(self) -> AsyncIterator["Body"]:
        """What one body holds is counted inside.

        Raises TimeoutError where it has not come in time, UnavailableError where it had to make room or is too late.
        """
        body = Body(self)
        try:
            async with asyncio.timeout(BODY_S) as body.time:
                self._coming.add(body)
                if self._is_closed:
                    body.end(draining_error())
                yield body
        except TimeoutError:
            if body.error is None:
                raise TimeoutError(f"the body took longer than {BODY_S:g} s") from None
        finally:
            self._coming.discard(body)
            self.give_back(body)
        if body.error is not None:
            self._on_refused(body.error)
            raise body.error

    def close(self) -> None:
        """The router has drained: nobody is to wait for those that have not come."""
        self._is_closed = True
        for body in self._coming:
            body.end(draining_error())

    def count(self, body: "Body", num_bytes: int) -> None:
        """So many more of it have come."""
        self._held.setdefault(body)
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > MAX_BYTES:
            next(iter(self._held)).end(_no_room())

    def give_back(self, body: "Body") -> None:
        """Count it no more; idempotent."""
        self._held.pop(body, None)
        self.num_bytes -= body.num_bytes
        body.num_bytes = 0


class Body:
    """One of them."""

    time: asyncio.Timeout  # that it has

    def __init__(self, bodies: Bodies) -> None:
        self.num_bytes = 0  # counted
        self.error: PageferryError | None = None  # with which it was ended
        self._data = bytearray()
        self._bodies = bodies

    def add(self, part: bytes) -> None:
        """The next part has come."""
        if self.error is None:
            self._data += part
            self._bodies.count(self, len(part))

    def drop(self) -> None:
        """Nobody wants it any more; what comes yet is not to be added."""
        self._data.clear()
        self._bodies.give_back(self)

    def whole(self) -> bytes:
        """All has come: there is no hurry any more. It is counted until the block of `receive` ends."""
        if self.error is not None:
            raise TimeoutError
        self.time.reschedule(None)
        data = bytes(self._data)
        self._data.clear()
        return data

    def end(self, error: PageferryError) -> None:
        """Give its bytes back, and let the block of `receive` end with the error; the first one counts."""
        self.error = self.error or error
        self.drop()
        if not self.time.expired():
            self.time.reschedule(0)


def _no_room() -> UnavailableError:
    message = f"bodies that wait for their rest have more than {MAX_BYTES} bytes together, and this one began first"
    return UnavailableError(message, reason="BODIES_FULL", retry_after_ms=_RETRY_AFTER_MS, nothing_begun=True)
