"""What a decode worker generates for all of the router's calls to it, in one stream: see `DecodeService.Subscribe`."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc

from pageferry.core.errors import UnavailableError
from pageferry.v1.decode_pb2 import CallEvents, DecodeResponse, SubscribeRequest, SubscribeResponse

_SUBSCRIPTION_BYTES = 16
# How long an error waits for the tokens before it; a deadline's does not, since the worker need not tell of that end.
_PATIENCE_S = 0.2
Subscribe = Callable[[SubscribeRequest], "grpc.aio.UnaryStreamCall[SubscribeRequest, SubscribeResponse]"]


class FedCall:
    """A Decode call of which the feed tells. The caller sends `subscription` and `number` with it."""

    def __init__(self, subscription: bytes, number: int, take: Callable[[CallEvents], None]) -> None:
        self.subscription = subscription
        self.number = number
        self._take = take
        self._is_told = asyncio.Event()  # all that there is
        self._is_complete = False

    def tell(self, events: CallEvents) -> None:
        self._take(events)
        self._is_complete = self._is_complete or events.HasField("completed")
        if events.failed or events.HasField("completed"):
            self.end()

    def end(self) -> None:
        """Nothing more will be told."""
        self._is_told.set()

    async def own_messages(self, call: AsyncIterable[DecodeResponse]) -> AsyncIterator[DecodeResponse]:
        """Those of the call's own stream, whose end comes when the feed has told all, or has ended.

        A good end waits as long as that takes, since a feed that lags is behind all the calls that it tells of.
        UnavailableError where the feed broke before it told of that end.
        """
        is_fed = False
        error: grpc.aio.AioRpcError | None = None
        try:
            async for message in call:
                is_fed = is_fed or message.reserved.subscribed
                yield message
        except grpc.aio.AioRpcError as raised:
            error = raised
        if error is None:
            if is_fed:
                await self._is_told.wait()
                if not self._is_complete:
                    raise UnavailableError("the stream of tokens broke", reason="SUBSCRIPTION_ENDED")
            return
        if is_fed and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await self._is_told.wait()
        raise error


class Feed:
    """Hands out what a subscription tells. It is never held up: whoever takes events keeps what is not read yet.

    Where its stream breaks, the worker ends the calls that it told of.
    """

    def __init__(self, subscribe: Subscribe) -> None:
        self._subscribe = subscribe
        self._calls: dict[int, FedCall] = {}
        self._numbers = itertools.count(1)
        self._id = b""  # once the worker has said that the stream is live
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_live(self) -> bool:
        return bool(self._id)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def open(self) -> None:
        """Begin a stream where there is none; idempotent."""
        if self._reader is None or self._reader.done() or self._reader.cancelling():
            self._reader = asyncio.create_task(self._read())

    def join(self, take: Callable[[CallEvents], None]) -> FedCall | None:
        """A new call, whose events `take` shall get; the caller owes `leave`.

        None where no stream is live: then the call tells of itself.
        """
        if not self._id:
            return None
        call = FedCall(self._id, next(self._numbers), take)
        self._calls[call.number] = call
        return call

    def leave(self, call: FedCall) -> None:
        """Nothing is taken any more."""
        del self._calls[call.number]

    def give_up(self) -> None:
        """End the stream, if there is one, and its calls: nothing more is expected of it."""
        self._id = b""
        if self._reader is not None:
            self._reader.cancel()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader

    async def _read(self) -> None:
        subscription = secrets.token_bytes(_SUBSCRIPTION_BYTES)
        stream: Any = self._subscribe(SubscribeRequest(subscription=subscription))
        try:
            async for message in stream:
                self._id = subscription
                for events in message.calls:
                    call = self._calls.get(events.call)
                    if call is not None:  # else the router has ended it
                        call.tell(events)
        except grpc.aio.AioRpcError:
            return  # it is opened again when the worker is heard of again
        finally:
            stream.cancel()
            if self._id == subscription:
                self._id = b""
            for call in self._calls.values():
                if call.subscription == subscription:
                    call.end()
