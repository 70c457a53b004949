"""What a push has to send: messages in order, the bytes of some of which the transfer thread is still making."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from pageferry.runtime.carriers import Batch
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.v1.page_pb2 import KeepAlive, PushRequest

KEEP_ALIVE = PushRequest(keep_alive=KeepAlive()).SerializeToString()


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """Messages: `making` gives their bytes, and `batches` are what of pages is in each of them."""

    making: "Future[list[bytes]]"
    batches: Sequence[Batch] = ()
    ends: bool = False  # nothing comes after it


class Outbox:
    """`on_sent` is told of each batch, and the time, just before its message is sent. All on the event loop."""

    def __init__(
        self, lease_s: float, on_sent: Callable[[Batch, float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease_s = lease_s
        self._on_sent = on_sent
        self._clock = clock
        self._queue: deque[_Outgoing] = deque()
        self._changed = asyncio.Event()  # something is new, or its bytes are there

    def put(self, request: PushRequest, *, ends: bool = False) -> None:
        made: Future[list[bytes]] = Future()
        made.set_result([request.SerializeToString()])
        self._queue.append(_Outgoing(made, ends=ends))
        self._changed.set()

    def put_batches(self, making: "Future[list[bytes]]", batches: Sequence[Batch]) -> None:
        """A message for each, which `making` gives."""
        self._queue.append(_Outgoing(making, batches))
        loop = asyncio.get_running_loop()
        making.add_done_callback(lambda _: call_on_loop(loop, self._changed.set))

    async def messages(self) -> AsyncIterator[bytes]:
        """In order, and a keep-alive where none was ready for a third of the lease. Raises what making one raised."""
        while True:
            self._changed.clear()
            while self._queue and self._queue[0].making.done():
                outgoing = self._queue.popleft()
                for index, message in enumerate(outgoing.making.result()):
                    if outgoing.batches:
                        self._on_sent(outgoing.batches[index], self._clock())
                    yield message
                if outgoing.ends:
                    return
            try:
                async with asyncio.timeout(self.lease_s / 3):
                    await self._changed.wait()
            except TimeoutError:
                yield KEEP_ALIVE
