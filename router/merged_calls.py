"""Several server streams read as one, in the order in which their messages arrive."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from pageferry.core.errors import InternalError, PageferryError
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.logs import log

_MAX_UNREAD = 32  # messages; beyond, the streams are not read, and gRPC's flow control holds the workers back
_Name = TypeVar("_Name")
_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, slots=True)
class Item(Generic[_Name]):
    """A message of the named call, or its end: with an error, or, where both are None, without."""

    name: _Name
    message: Any = None
    error: PageferryError | None = None


class MergedCalls(Generic[_Name]):
    """The caller owes `close`, which ends every call whatever its state."""

    def __init__(self) -> None:
        self._items: deque[Item[_Name]] = deque()
        self._changed = asyncio.Event()  # there is an item, or an interruption
        self._room = asyncio.Event()
        self._calls: list[grpc.aio.UnaryStreamCall[Any, Any]] = []
        self._readers: list[asyncio.Task[None]] = []
        self._interruption: PageferryError | None = None

    def add(
        self,
        name: _Name,
        call: "grpc.aio.UnaryStreamCall[Any, Any]",
        messages: AsyncIterator[Message] | None = None,
    ) -> None:
        """`messages` are read instead of the call's own."""
        self._calls.append(call)
        self._readers.append(asyncio.create_task(self._read(name, messages or aiter(call))))

    def put(self, name: _Name, message: _Message) -> _Message:
        """Take a message that did not come on the call's own stream.

        Where the last item is an unread one of its kind, it is merged into that: a reader that is slow gets few.
        Returns the message that is to be read.
        """
        last = self._items[-1] if self._items else None
        if last is not None and last.name == name and isinstance(last.message, type(message)):
            last.message.MergeFrom(message)
            return last.message
        self._put(Item(name, message))
        return message

    def fail(self, name: _Name, error: PageferryError) -> None:
        """End the named call behind what it has brought so far, without a word of its own."""
        self._put(Item(name, error=error))

    async def get(self, timeout_s: float | None) -> Item[_Name] | None:
        """The next item; None where none came in time."""
        if timeout_s is None:
            await self._changed.wait()
        elif not await _is_set(self._changed, timeout_s):
            return None
        if self._interruption is not None:
            raise self._interruption
        item = self._items.popleft()
        if not self._items:
            self._changed.clear()
        self._room.set()
        return item

    def interrupt(self, error: PageferryError) -> None:
        """Make `get` raise the error from now on, and end every call: it may be long before anybody asks."""
        self._interruption = error
        self._items.clear()
        for call in self._calls:
            call.cancel()
        self._changed.set()

    async def close(self) -> None:
        # Ending an iteration does not end its call.
        for call in self._calls:
            call.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def _put(self, item: Item[_Name]) -> None:
        if self._interruption is not None:
            return  # nobody will read it
        self._items.append(item)
        self._changed.set()

    async def _read(self, name: _Name, messages: AsyncIterator[Message]) -> None:
        end: Item[_Name] = Item(name)
        try:
            async for message in messages:
                self._put(Item(name, message))
                while len(self._items) >= _MAX_UNREAD:
                    self._room.clear()
                    await self._room.wait()
        except grpc.aio.AioRpcError as error:
            end = Item(name, error=from_rpc_error(error, "the worker"))
        except PageferryError as error:
            end = Item(name, error=error)
        except Exception as error:
            log("reading_failed", level="error", error=error)
            end = Item(name, error=InternalError(f"internal error: {type(error).__name__}"))
        self._put(end)


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether it is, or becomes, in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
