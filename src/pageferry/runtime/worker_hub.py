"""How a worker tells routers of its state: a snapshot to each watcher, then every change, in order."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from pageferry.core.errors import ResourceExhaustedError
from pageferry.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

MAX_QUEUED_EVENTS = 1024
HEARTBEAT_S = 0.5
MIN_LOAD_INTERVAL_S = 0.02
MAX_HASHES_PER_MESSAGE = 65_536  # 1 MiB


class _Watcher:
    """What one watcher has not been sent yet. Of loads only the newest matters; other events are never left out."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque()  # each one field of WatchResponse
        self.load: inference_pb2.WorkerLoad | None = None
        self.overflown = False
        self.ready = asyncio.Event()

    def put(self, **event: Any) -> None:
        if len(self.events) >= MAX_QUEUED_EVENTS:
            self.overflown = True
        else:
            self.events.append(event)
        self.ready.set()


class WorkerHub(worker_pb2_grpc.WorkerServiceServicer):
    """The WorkerService. All methods run on the event loop.

    The hub itself keeps the hashes published, and fills `cached_hashes` and `draining` of a snapshot: so a snapshot
    and the changes after it always fit. A watcher that reads too slowly is ended with an error, and starts over.
    """

    def __init__(self, incarnation: bytes, snapshot: Callable[[], worker_pb2.Snapshot]) -> None:
        """`snapshot` gives all but the hashes."""
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._watchers: set[_Watcher] = set()
        self._cached: dict[bytes, None] = {}
        self.load: inference_pb2.WorkerLoad | None = None  # the newest
        self._draining = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def publish_load(self, load: inference_pb2.WorkerLoad) -> None:
        """Call as often as the load changes; watchers get the newest at most every 20 ms."""
        self.load = load
        for watcher in self._watchers:
            watcher.load = load
            watcher.ready.set()

    def publish_cache(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for page_hash in removed:
            self._cached.pop(page_hash, None)
        self._cached.update(dict.fromkeys(stored))
        for event in _cache_events(stored, removed):
            self._publish(cache=event)

    def publish_draining(self) -> None:
        if not self._draining:
            self._draining = True
            self._publish(draining=worker_pb2.Draining())

    async def Watch(  # noqa: N802 - named by the contract
        self, request: worker_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        watcher = _Watcher()
        self._begin(watcher)
        self._watchers.add(watcher)
        sequence = 0
        try:
            async for event in self._events(watcher):
                sequence += 1
                yield worker_pb2.WatchResponse(incarnation=self._incarnation, sequence=sequence, **event)
        finally:
            self._watchers.discard(watcher)

    def _publish(self, **event: Any) -> None:
        for watcher in self._watchers:
            watcher.put(**event)

    def _begin(self, watcher: _Watcher) -> None:
        """What a watcher is told first: all there is to know; hashes that don't fit into the snapshot follow it."""
        hashes = list(self._cached)
        snapshot = worker_pb2.Snapshot()
        snapshot.CopyFrom(self._snapshot())
        snapshot.draining = snapshot.draining or self._draining
        snapshot.cached_hashes = b"".join(hashes[:MAX_HASHES_PER_MESSAGE])
        watcher.put(snapshot=snapshot)
        for event in _cache_events(hashes[MAX_HASHES_PER_MESSAGE:], ()):
            watcher.put(cache=event)

    async def _events(self, watcher: _Watcher) -> AsyncIterator[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        load_sent = loop.time()
        while True:
            while watcher.events and not watcher.overflown:
                yield watcher.events.popleft()
            if watcher.overflown:
                message = f"watcher has more than {MAX_QUEUED_EVENTS} events to read: watch again"
                raise ResourceExhaustedError(message, reason="WATCH_OVERFLOW")
            next_load = load_sent + (MIN_LOAD_INTERVAL_S if watcher.load else HEARTBEAT_S)
            if loop.time() < next_load:
                await _wait(watcher.ready, next_load)
                continue
            load, watcher.load, load_sent = watcher.load or self.load, None, loop.time()
            if load is not None:
                yield {"load": load}


async def _wait(ready: asyncio.Event, until: float) -> None:
    try:
        async with asyncio.timeout_at(until):
            await ready.wait()
    except TimeoutError:
        return
    finally:
        ready.clear()


def _cache_events(stored: Sequence[bytes], removed: Sequence[bytes]) -> Iterable[worker_pb2.CacheEvents]:
    size = MAX_HASHES_PER_MESSAGE
    for start in range(0, len(removed), size):
        yield worker_pb2.CacheEvents(removed=b"".join(removed[start : start + size]))
    for start in range(0, len(stored), size):
        yield worker_pb2.CacheEvents(stored=b"".join(stored[start : start + size]))
