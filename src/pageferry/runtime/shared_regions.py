"""Memory that a receiver of pages shares, as their sender has it: see `staging`."""

import asyncio
import hmac
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Self
from weakref import WeakKeyDictionary, ref

import grpc

from pageferry.runtime.staging import (
    DIRECTORY,
    HEADER_BYTES,
    PREFIX,
    SECRET_BYTES,
    STAGED_BYTES,
    UNIT_BYTES,
    opened,
)
from pageferry.v1.page_pb2 import StagingOffer


class SharedRegion:
    """A region as its sender has it: room to put pages into, shared by all pushes of a connection."""

    def __init__(self, memory: mmap.mmap, proof: bytes) -> None:
        self.proof = proof
        self.memory = memoryview(memory)
        self.waiting: set[asyncio.Event] = set()  # to be set when there is more room
        self.num_users = 0
        self.idle: asyncio.TimerHandle | None = None
        self._num_units = (len(memory) - HEADER_BYTES) // UNIT_BYTES
        self._used = 0  # bit set of units

    @classmethod
    def attach(cls, offer: StagingOffer, directory: Path) -> Self | None:
        """Blocks. None where it isn't there, isn't the receiver's, isn't ours alone, or is too small for a message."""
        if not offer.name.startswith(PREFIX) or "/" in offer.name or offer.num_bytes < HEADER_BYTES + STAGED_BYTES:
            return None
        with suppress(OSError, ValueError), opened(directory / offer.name) as file:
            status = os.fstat(file)
            secret = os.pread(file, 2 * SECRET_BYTES, 0)
            is_ours = status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0
            if (
                is_ours
                and status.st_size >= offer.num_bytes
                and hmac.compare_digest(secret[:SECRET_BYTES], offer.nonce)
            ):
                memory = mmap.mmap(file, offer.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                os.unlink(directory / offer.name)  # as the receiver does, unless it is killed before it hears of it
                return cls(memory, secret[SECRET_BYTES:])
        return None

    def take(self, num_bytes: int) -> int | None:
        """Where so many bytes are free; None where they are not, side by side."""
        units = _units(num_bytes)
        for first in range(self._num_units - units.bit_length() + 1):
            if not self._used & units << first:
                self._used |= units << first
                return HEADER_BYTES + first * UNIT_BYTES
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        self._used &= ~(_units(num_bytes) << (start - HEADER_BYTES) // UNIT_BYTES)
        for event in self.waiting:
            event.set()


class SharedRegions:
    """The regions that a sender has attached, by connection; None where it could not.

    One that no push has used for a while is let go, as its receiver does: that may be dead, and is not heard of again.
    """

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.directory = directory
        self._regions: WeakKeyDictionary[grpc.aio.Channel, SharedRegion | None] = WeakKeyDictionary()

    def get(self, channel: grpc.aio.Channel) -> SharedRegion | None:
        return self._regions.get(channel)

    def has_none(self, channel: grpc.aio.Channel) -> None:
        """The receiver's memory could not be attached."""
        self._regions.setdefault(channel, None)

    def use(self, channel: grpc.aio.Channel, region: SharedRegion) -> None:
        """For one push, which owes `give_back`."""
        self._regions[channel] = region
        region.num_users += 1
        if region.idle is not None:
            region.idle.cancel()
            region.idle = None

    def give_back(self, channel: grpc.aio.Channel, region: SharedRegion, idle_s: float) -> None:
        """The push is over; call on the event loop."""
        region.num_users -= 1
        if region.num_users == 0:
            region.idle = asyncio.get_running_loop().call_later(idle_s, self._let_go, ref(channel), region)

    def _let_go(self, channel: "ref[grpc.aio.Channel]", region: SharedRegion) -> None:
        """Its memory goes once no copy refers to it any more."""
        of = channel()
        if of is not None and self._regions.get(of) is region:
            del self._regions[of]

    def is_apart(self, channel: grpc.aio.Channel) -> bool:
        """Whether its receiver's memory could never be attached: it would make a region for nothing at each push."""
        return channel in self._regions and self._regions[channel] is None


def _units(num_bytes: int) -> int:
    """A bit for each unit that so many bytes take."""
    return (1 << -(-num_bytes // UNIT_BYTES)) - 1
