"""What a push's receiver asks of the tickets, passed on to the desk on the engine's thread."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from pageferry.core.errors import PageferryError, UnavailableError, invalid
from pageferry.core.layout import PageLayout
from pageferry.core.plan import SampledToken
from pageferry.decode_svc.desk import Opening, TicketDesk
from pageferry.decode_svc.events import Event
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.receive import FrameKey, Grant


class EngineDesk:
    """The runtime's TicketDesk. Lives on the event loop."""

    def __init__(
        self,
        desk: TicketDesk,
        engine: EngineThread[Event],
        clock: Callable[[], float],
        metrics: Metrics,
        *,
        lease_ms: int,
        vocab_size: int,
    ) -> None:
        self._desk = desk
        self._engine = engine
        self._clock = clock
        self._metrics = metrics
        self._lease_ms = lease_ms
        self._vocab_size = vocab_size

    async def open(self, ticket: bytes, layout: PageLayout) -> Grant:
        grant = Grant(ticket, self._lease_ms)  # known to the desk by itself, so that an end can come before its pages
        opening: Opening | None = None
        try:
            opening = await self._engine.call(lambda: self._desk.open(grant, ticket, layout, self._clock()))
        finally:
            if opening is None:  # refused, or cancelled while the engine opened it all the same
                self._post(lambda: self._desk.close(grant, None))
        grant.first_page, grant.pages = opening.first_page, opening.pages
        return grant

    def receive(self, grant: Grant, frames: Sequence[FrameKey]) -> None:
        self._post(lambda: self._desk.receive(grant, frames, self._clock()))

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        if first is not None and first[1].token_id >= self._vocab_size:
            limit = f"must be below the vocabulary's size, {self._vocab_size}"
            raise invalid("commit.first_tokens.token_id", first[1].token_id, limit)
        await self._engine.call(lambda: self._desk.commit(grant, covered_tokens, first, self._clock()))

    def close(self, grant: Grant, error: PageferryError | None) -> None:
        if error is not None:
            self._metrics.count_broken_handoff()
        self._post(lambda: self._desk.close(grant, error))

    def _post(self, command: Callable[[], object]) -> None:
        with suppress(UnavailableError):  # after the thread's end there is nothing to give back to
            self._engine.post(command)
