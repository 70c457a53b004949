"""One prompt's pages on their way to a decode worker, while the next chunk is computed."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from pageferry.core.errors import InternalError, PageferryError, UnavailableError
from pageferry.core.layout import Place
from pageferry.core.plan import SampledToken
from pageferry.core.sender import HandoffStats
from pageferry.runtime.carriers import Pages
from pageferry.runtime.logs import log
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.push import PushClient
from pageferry.v1.prefill_pb2 import HandoffTarget

MAX_IDLE_CHANNELS = 16


class DecodeChannels:
    """Channels to decode workers, kept for the next push; the least recently used idle ones are closed."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._channels: OrderedDict[str, tuple[grpc.aio.Channel, int]] = OrderedDict()  # and its users

    @contextmanager
    def use(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        known = self._channels.get(endpoint)
        channel, num_users = known if known is not None else (self._open_channel(endpoint), 0)
        self._channels[endpoint] = (channel, num_users + 1)
        self._channels.move_to_end(endpoint)
        try:
            yield channel
        finally:
            self._channels[endpoint] = (channel, self._channels[endpoint][1] - 1)

    async def close_idle(self, num_kept: int = MAX_IDLE_CHANNELS) -> None:
        idle = [endpoint for endpoint, (_, num_users) in self._channels.items() if num_users == 0]
        closing = [self._channels.pop(endpoint)[0] for endpoint in idle[: max(0, len(idle) - num_kept)]]
        for channel in closing:
            await channel.close()


class Shipment:
    """A push that takes pages as they come. It owns the references of the pages that it was given.

    `on_over` is called once, on the event loop: with the figures, or with an UnavailableError that names what broke the
    push. After `cancel` it is not called any more.
    """

    def __init__(
        self,
        channels: DecodeChannels,
        target: HandoffTarget,
        request_id: str,
        parts: PushParts,
        give_back: Callable[[Sequence[Place]], None],
        on_over: Callable[[HandoffStats | PageferryError], None],
    ) -> None:
        self._channels = channels
        self._target = target
        self._request_id = request_id
        self._parts = parts
        self._give_back = give_back
        self._on_over = on_over
        self._waiting: deque[Pages] = deque()
        self._changed = asyncio.Event()
        self._finish: tuple[int, tuple[int, SampledToken] | None] | None = None
        self._push: PushClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self) -> asyncio.Task[None]:
        """Open the push, as a child of the current span. The caller keeps the task; it ends when all is cleaned up."""
        self._task = asyncio.create_task(self._run(), name="shipment")
        return self._task

    def add(self, pages: Pages) -> None:
        """Ship these; takes over a reference to each page."""
        if self._is_over:
            self._give_back([place for _, place in pages])
        elif pages:
            self._waiting.append(pages)
            self._changed.set()

    def finish(self, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        """Compute has ended and nothing more comes: commit when all is sent. `first`: position and token drawn."""
        if self._push is not None:
            self._push.compute_ended()
        self._finish = (covered_tokens, first)
        self._changed.set()

    def cancel(self) -> None:
        """Break the push off, unless it is over; pages go back as soon as nobody copies them any more."""
        self._drop_waiting()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            with self._channels.use(self._target.kv_endpoint) as channel:
                outcome: HandoffStats | PageferryError = await self._ship(channel)
        except PageferryError as error:
            text = f"the hand-off to {self._target.kv_endpoint} broke off: {error.message}"
            outcome = UnavailableError(text, reason=error.reason)
        except Exception as error:
            log("shipment_failed", level="error", error=error)
            outcome = InternalError(f"the hand-off failed: {type(error).__name__}")
        finally:
            self._drop_waiting()
        self._on_over(outcome)
        await self._channels.close_idle()

    async def _ship(self, channel: grpc.aio.Channel) -> HandoffStats:
        ticket, endpoint = self._target.ticket, self._target.kv_endpoint
        async with PushClient(channel, ticket, self._request_id, self._parts, self._give_back, endpoint) as push:
            self._push = push
            watch = asyncio.create_task(push.broken.wait())
            watch.add_done_callback(lambda _: self._changed.set())
            try:
                await push.open()
                while (pages := await self._next(push)) is not None:
                    await push.ship(pages)
                assert self._finish is not None
                return await push.commit(*self._finish)
            finally:
                watch.cancel()

    async def _next(self, push: PushClient) -> Pages | None:
        """The next pages; None where nothing more comes. Raises what broke the push while it waits."""
        while not self._waiting:
            if push.failure is not None:
                raise push.failure
            if self._finish is not None:
                push.compute_ended()
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def _drop_waiting(self) -> None:
        self._is_over = True
        while self._waiting:
            self._give_back([place for _, place in self._waiting.popleft()])
