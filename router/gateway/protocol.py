"""HTTP/1.1 as uvicorn has it, but for peers that break it or never get to the point."""

import asyncio
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

UNREAD_S = 120.0  # for a peer that reads nothing of an answer, once no more of it fits on the way
HEADER_S = 30.0  # for the whole head of a request, once its connection stands or its first byte has come
_LAST_LOOK_S = 0.1  # after that, since timers go before reads: what came while this process stood still is read


class HttpProtocol(H11Protocol):
    """One connection."""

    _overdue: asyncio.TimerHandle | None = None  # while a request's head is awaited
    _unread: asyncio.TimerHandle | None = None  # while the peer has to read first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._forget_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_unread()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Cut off a peer that sends no HTTP; whatever is at work for it is told that it has gone.

        It would otherwise go on, and fail for having to send on a connection that has had its last answer.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with suppress(h11.LocalProtocolError):  # an answer has begun
            super().send_400_response(msg)
        self.transport.close()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        if self._overdue is None:
            self._overdue = self.loop.call_later(HEADER_S, self._look_once_more)

    def _look_once_more(self) -> None:
        self._overdue = self.loop.call_later(_LAST_LOOK_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
