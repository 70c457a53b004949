"""Memory that two processes of one host share while one hands pages to the other: the receiver's side of it.

The receiver makes a region, whose name goes as soon as the sender has it mapped; from then on it ends with the two
processes. One region serves all pushes of a connection: making one costs more than filling it. A name whose
maker was killed before it was unlinked is removed by the next receiver that starts.
"""

import asyncio
import fcntl
import hmac
import mmap
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from pageferry.core.errors import invalid
from pageferry.runtime.logs import log
from pageferry.v1.page_pb2 import StagingOffer

DIRECTORY = Path("/dev/shm")
HEADER_BYTES = 4096  # the nonce, the proof, and what makes a page full
UNIT_BYTES = 1 << 20
NUM_UNITS = 16
REGION_BYTES = HEADER_BYTES + NUM_UNITS * UNIT_BYTES
STAGED_BYTES = 8 << 20  # of one message: two of them fill a region, and each costs more than the copy of a page
MAX_REGIONS = 16  # of one receiver; more senders than that send inline
MAX_STAGED_BYTES = MAX_REGIONS * REGION_BYTES  # that a receiver may come to share
SECRET_BYTES = 16
PREFIX = "pageferry-"
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnRegion:
    """A receiver's region, which it only reads. `create` and the first use block: not on the event loop."""

    def __init__(self, path: Path, file: int, num_bytes: int) -> None:
        self.proof = secrets.token_bytes(SECRET_BYTES)
        self.num_users = 0
        self.is_attached = False
        self.idle: asyncio.TimerHandle | None = None
        self._path = path
        self._file = file
        nonce = secrets.token_bytes(SECRET_BYTES)
        self.offer = StagingOffer(name=path.name, nonce=nonce, num_bytes=num_bytes)
        # All of it is allocated at once: a full /dev/shm is an error here, and no SIGBUS later.
        os.posix_fallocate(file, 0, num_bytes)
        os.pwrite(file, nonce + self.proof, 0)
        self.memory = memoryview(mmap.mmap(file, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))

    @classmethod
    def create(cls, directory: Path, num_bytes: int) -> Self:
        """OSError where it can't be: no such directory, no room, no permission."""
        path = directory / f"{PREFIX}{secrets.token_hex(8)}"
        file = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # while the name is there: see `remove_stale`
            return cls(path, file, num_bytes)
        except BaseException:
            os.close(file)
            with suppress(OSError):
                os.unlink(path)
            raise

    def attached(self, proof: bytes) -> None:
        """The sender has it mapped, and nobody else can from now on; InvalidArgumentError unless it proves it."""
        if not hmac.compare_digest(proof, self.proof):
            raise invalid("attached.proof", f"{len(proof)} bytes", "is not what the staging region says")
        self.is_attached = True
        self.unlink()

    def unlink(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with suppress(OSError):
                os.unlink(self._path)


class OwnRegions:
    """The regions of a receiver, each lent to the pushes of one sender; one that none uses for `idle_s` is dropped."""

    def __init__(
        self,
        executor: ThreadPoolExecutor,
        idle_s: float,
        *,
        directory: Path = DIRECTORY,
        num_bytes: int = REGION_BYTES,
    ) -> None:
        self._executor = executor
        self._idle_s = idle_s
        self._directory = directory
        self._num_bytes = num_bytes
        self._regions: dict[bytes, OwnRegion] = {}
        self._num_creating = 0
        self._is_failing = False  # the last one could not be made, which was logged
        remove_stale(directory)

    def __len__(self) -> int:
        return len(self._regions)

    async def borrow(self, proof: bytes) -> OwnRegion | None:
        """The region with that proof, else a new one; None where there can be none. The caller owes `give_back`."""
        region = self._regions.get(proof)
        if region is None:
            has_room = len(self._regions) + self._num_creating < MAX_REGIONS
            region = await self._create() if has_room else None
        else:
            region.attached(proof)  # its first push's message that says so may be under way yet
        if region is None:
            return None
        self._regions[region.proof] = region
        region.num_users += 1
        if region.idle is not None:
            region.idle.cancel()
            region.idle = None
        return region

    def give_back(self, region: OwnRegion) -> None:
        """Call when nothing is copied out of it any more on behalf of the borrower."""
        region.num_users -= 1
        if not region.is_attached:
            self._drop(region)
        elif region.num_users == 0:
            region.idle = asyncio.get_running_loop().call_later(self._idle_s, self._drop, region)

    async def _create(self) -> OwnRegion | None:
        creating = self._executor.submit(OwnRegion.create, self._directory, self._num_bytes)
        self._num_creating += 1
        try:
            region = await asyncio.wrap_future(creating)
        except OSError as error:
            if not self._is_failing:
                log("staging_unavailable", level="warning", error=error)
            self._is_failing = True
            return None
        except asyncio.CancelledError:
            creating.add_done_callback(_discard)
            raise
        else:
            self._is_failing = False
            return region
        finally:
            self._num_creating -= 1

    def _drop(self, region: OwnRegion) -> None:
        """Its memory goes once nothing refers to it any more."""
        region.unlink()
        self._regions.pop(region.proof, None)


def remove_stale(directory: Path) -> None:
    """Remove names that no living process holds, told by their locks: process ids mean nothing across containers."""
    for path in directory.glob(PREFIX + "*"):
        with suppress(OSError), opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    file = os.open(path, _OPEN_FLAGS)
    try:
        yield file
    finally:
        os.close(file)


def _discard(creating: "Future[OwnRegion]") -> None:
    """Of a region that nobody waits for any more."""
    if not creating.cancelled() and creating.exception() is None:
        creating.result().unlink()
