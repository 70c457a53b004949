"""How the pages of one push travel: who carries them, and what makes its messages."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import grpc
from opentelemetry.trace import Tracer

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import FailedPreconditionError
from pageferry.core.page_io import DeviceClock, PageSource
from pageferry.runtime.carriers import INLINE, SHM, Batch, Carrier, InlineCarrier, Pages, StagedCarrier, cut
from pageferry.runtime.device_spans import CopyTimes
from pageferry.runtime.push_report import PushFigures
from pageferry.runtime.shared_regions import SharedRegion, SharedRegions
from pageferry.v1.page_pb2 import Open, Opened, PushRequest, StagingAttached


@dataclass(frozen=True, slots=True)
class PushParts:
    """What all pushes of a process share; `executor` is its one transfer thread."""

    source: PageSource
    executor: ThreadPoolExecutor
    config: HandoffConfig
    tracer: Tracer
    regions: SharedRegions = field(default_factory=SharedRegions)
    clock: Callable[[], float] = time.monotonic
    on_over: Callable[[PushFigures], None] = lambda figures: None
    device: DeviceClock | None = None  # that the pages are on


class PageTransfer:
    """Shared memory where both ends want and can, else messages. Used on the event loop; its maker owes `close`."""

    def __init__(self, parts: PushParts, channel: grpc.aio.Channel, has_room: asyncio.Event) -> None:
        """`has_room` is set whenever there is more room."""
        self.carrier: Carrier = InlineCarrier(parts.config.max_frames_in_flight, several=False)  # until it is chosen
        self._parts = parts
        self._channel = channel
        self._has_room = has_room
        self._known: SharedRegion | None = None  # of an earlier push
        self._region: SharedRegion | None = None  # that the carrier uses

    def ask(self, opening: Open) -> None:
        """Ask for shared memory; where it would be in vain, only if nothing else will do."""
        transport, parts = self._parts.config.transport, self._parts
        self._known = parts.regions.get(self._channel)
        is_vain = parts.regions.is_apart(self._channel) or not StagedCarrier.carries(parts.source.layout)
        if transport == SHM or (transport != INLINE and not is_vain):
            opening.staging.proof = self._known.proof if self._known is not None else b""

    async def choose(self, opened: Opened, tell: Callable[[PushRequest], None]) -> None:
        """Once the receiver has answered, who is told what has come of its offer.

        FailedPreconditionError where only shared memory will do, and there is none.
        """
        parts, region = self._parts, None
        if opened.HasField("staging") and not opened.staging.name:
            region = self._known
        elif opened.HasField("staging"):
            attaching = parts.executor.submit(SharedRegion.attach, opened.staging, parts.regions.directory)
            region = await asyncio.wrap_future(attaching)
            if region is None:
                parts.regions.has_none(self._channel)
            tell(PushRequest(attached=StagingAttached(proof=region.proof if region is not None else b"")))
        if region is not None and StagedCarrier.carries(parts.source.layout):
            self.carrier = StagedCarrier(region, self._has_room)
            parts.regions.use(self._channel, region)
            self._region = region
        elif parts.config.transport == SHM:
            message = "handoff.transport is shm, but the receiver shares no memory with this process"
            raise FailedPreconditionError(message, reason="NO_SHARED_MEMORY")
        else:
            self.carrier = InlineCarrier(parts.config.max_frames_in_flight, several=opened.takes_frames)

    def cut(self, pages: Pages) -> Iterator[list[Batch]]:
        """As batches that are copied together: few, so that the first are sent while the next are copied."""
        batches = cut(pages, self._parts.source.layout, self.carrier)
        while together := list(islice(batches, self.carrier.num_together)):
            yield together

    def copy(self, batches: Sequence[Batch], rooms: Sequence[int], times: CopyTimes) -> "Future[list[bytes]]":
        """Their messages, whose bytes the transfer thread makes."""
        carrier, source = self.carrier, self._parts.source

        def read() -> list[bytes]:
            with times.counted():
                return [carrier.read(source, batch, room) for batch, room in zip(batches, rooms, strict=True)]

        return self._parts.executor.submit(read)

    def close(self) -> None:
        self.carrier.close()
        if self._region is not None:
            self._parts.regions.give_back(self._channel, self._region, self._parts.config.lease_ms / 1000)
