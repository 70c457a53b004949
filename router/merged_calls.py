"""Several server streams read as one, in the order in which their messages arrive."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from pageferry.core.errors import PageferryError
from pageferry.runtime.errors import from_rpc_error

_MAX_UNREAD = 32  # messages; beyond, the streams are not read, and gRPC's flow control holds the workers back
_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True)
class Item(Generic[_Name]):
    """A message of the named call, or its end: with an error, or, where both are None, without."""

    name: _Name
    message: Any = None
    error: PageferryError | None = None


class MergedCalls(Generic[_Name]):
    """The caller owes `close`, which ends every call whatever its state."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item[_Name] | None] = asyncio.Queue(_MAX_UNREAD)
        self._calls: list[grpc.aio.UnaryStreamCall[Any, Any]] = []
        self._readers: list[asyncio.Task[None]] = []
        self._interruption: PageferryError | None = None

    def add(self, name: _Name, call: "grpc.aio.UnaryStreamCall[Any, Any]") -> None:
        self._calls.append(call)
        self._readers.append(asyncio.create_task(self._read(name, call)))

    async def get(self, timeout_s: float | None) -> Item[_Name] | None:
        """The next item; None where none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._items.get()
        except TimeoutError:
            return None
        if self._interruption is not None:
            raise self._interruption
        return item

    def interrupt(self, error: PageferryError) -> None:
        """Make `get` raise the error from now on."""
        self._interruption = error
        with suppress(asyncio.QueueFull):  # if it is full, nobody waits for an item
            self._items.put_nowait(None)

    async def close(self) -> None:
        # Ending an iteration does not end its call.
        for call in self._calls:
            call.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, name: _Name, call: "grpc.aio.UnaryStreamCall[Any, Any]") -> None:
        end: Item[_Name] = Item(name)
        try:
            async for message in call:
                await self._items.put(Item(name, message))
        except grpc.aio.AioRpcError as error:
            end = Item(name, error=from_rpc_error(error))
        await self._items.put(end)
