"""Streams that tell of many Decode calls: of each step one message for all of them, not one for each."""

import asyncio
from contextlib import suppress
from typing import Any

from pageferry.core.errors import AlreadyExistsError, UnavailableError, invalid
from pageferry.decode_svc.call import MOST_TOKENS, Call
from pageferry.v1 import decode_pb2 as pb

SUBSCRIPTION_BYTES = 16
_CLOSE_S = 1.0  # for readers to take what is left


class Subscription:
    """One Subscribe stream. What its calls generate while it is written gathers, and is told in one message."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()  # live ones
        self._numbers: set[int] = set()  # of those, and of calls that are over and have something to tell
        self._news: dict[Call, None] = {}  # those with something to tell, over calls among them
        self._ending = False
        self._changed = asyncio.Event()

    def join(self, call: Call) -> None:
        """Tell of a new call. AlreadyExistsError for a number that another one has: their tokens would mingle."""
        if call.number in self._numbers:
            message = f"call {call.number} of the subscription is live: each needs a number of its own"
            raise AlreadyExistsError(message, reason="CALL_NUMBER_LIVE")
        self._numbers.add(call.number)
        self.calls.add(call)

    def mark(self, call: Call) -> None:
        """The call has something to tell."""
        self._news[call] = None
        self._changed.set()

    def leave(self, call: Call) -> None:
        """The call is over; if its caller has ended it, nobody wants to know more of it."""
        self.calls.discard(call)
        if call.end is None:
            self._news.pop(call, None)
        self._forget(call)

    def finish(self) -> None:
        """Let the stream end when all is told."""
        self._ending = True
        self._changed.set()

    async def next(self) -> pb.SubscribeResponse | None:
        """Wait for news; None at the end."""
        while not self._news:
            if self._ending:
                return None
            self._changed.clear()
            await self._changed.wait()
        response, num_tokens = pb.SubscribeResponse(), 0
        while self._news:
            call = next(iter(self._news))
            num_tokens += call.num_untold
            if response.calls and num_tokens > MOST_TOKENS:  # the next message has it
                break
            del self._news[call]
            response.calls.append(call.news())
            if call.tokens:
                self._news[call] = None
            self._forget(call)
        return response

    def _forget(self, call: Call) -> None:
        """Once it is over and all is told, its number may be used again."""
        if call not in self.calls and call not in self._news:
            self._numbers.discard(call.number)


class Subscriptions:
    """Those that are live on this worker, by the ids that their callers have drawn."""

    def __init__(self) -> None:
        self._live: dict[bytes, Subscription] = {}
        self._closing = False
        self._ended = asyncio.Event()

    def join(self, subscription_id: bytes, call: Call) -> None:
        """Let the subscription, where it is live, tell of a new call. The caller owes `leave`."""
        subscription = self._live.get(subscription_id)
        if subscription is not None:
            subscription.join(call)
            call.subscription = subscription

    async def serve(self, request: pb.SubscribeRequest, context: Any) -> None:
        """Write to the stream until it ends; calls that it tells of then fail."""
        name = request.subscription
        if len(name) != SUBSCRIPTION_BYTES:
            raise invalid("subscription", f"{len(name)} bytes", f"must be {SUBSCRIPTION_BYTES} random ones")
        if name in self._live:
            raise AlreadyExistsError("the subscription is live", reason="SUBSCRIPTION_LIVE")
        subscription = self._live[name] = Subscription()
        if self._closing:
            subscription.finish()
        try:
            await context.write(pb.SubscribeResponse())  # from now on calls may name it
            while (message := await subscription.next()) is not None:
                await context.write(message)
        finally:
            del self._live[name]
            self._ended.set()
            lost = UnavailableError("the subscription that tokens went to has ended", reason="SUBSCRIPTION_ENDED")
            for call in subscription.calls:
                if call.end is None:
                    call.take_end(lost)

    async def close(self) -> None:
        """Let each end when its reader has been told all, if that doesn't take long; new ones end at once."""
        self._closing = True
        for subscription in self._live.values():
            subscription.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._live:
                    self._ended.clear()
                    await self._ended.wait()
