"""What watchers of a worker are told, and what becomes of one that reads too slowly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import ServerConfig
from pageferry.core.errors import ResourceExhaustedError
from pageferry.runtime import worker_hub
from pageferry.runtime.channels import open_channel
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.v1 import worker_pb2, worker_pb2_grpc
from pageferry.v1.inference_pb2 import WorkerLoad

INCARNATION = b"i" * 16


def page_hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


def new_hub() -> WorkerHub:
    return WorkerHub(INCARNATION, lambda: worker_pb2.Snapshot(role=worker_pb2.WORKER_ROLE_DECODE, model="tiny"))


@asynccontextmanager
async def serving(hub: WorkerHub) -> AsyncIterator[Any]:
    async with GrpcServer(ServerConfig(), NoOpTracer()) as server:
        server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, hub, "pageferry.v1.WorkerService")
        port = await server.start()
        async with open_channel(f"127.0.0.1:{port}", NoOpTracer()) as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)


async def first(watch: Any, kind: str) -> Any:
    """The next message of that kind."""
    async for message in watch:
        if message.WhichOneof("event") == kind:
            return message
    raise AssertionError(f"the stream ended without {kind}")


async def test_a_snapshot_then_every_change_numbered_without_a_gap() -> None:
    hub = new_hub()
    hub.publish_cache([page_hash(1), page_hash(2)], [])
    hub.publish_cache([page_hash(3)], [page_hash(1)])
    async with serving(hub) as stub:
        watch = stub.Watch(worker_pb2.WatchRequest())
        message = await watch.read()
        assert (message.incarnation, message.sequence) == (INCARNATION, 1)
        assert message.snapshot.model == "tiny"
        assert message.snapshot.cached_hashes == page_hash(2) + page_hash(3)

        hub.publish_cache([page_hash(4)], [page_hash(2)])
        hub.publish_load(WorkerLoad(running=3))
        hub.publish_draining()
        hub.publish_draining()
        messages = [await watch.read() for _ in range(4)]
        assert [message.sequence for message in messages] == [2, 3, 4, 5]
        assert [message.WhichOneof("event") for message in messages] == ["cache", "cache", "draining", "load"]
        assert messages[0].cache.removed == page_hash(2)
        assert messages[1].cache.stored == page_hash(4)
        assert messages[3].load.running == 3

        late = await stub.Watch(worker_pb2.WatchRequest()).read()
        assert late.sequence == 1, "each watcher has its own numbers"
        assert late.snapshot.draining
        assert late.snapshot.cached_hashes == page_hash(3) + page_hash(4)


async def test_of_loads_only_the_newest_is_sent() -> None:
    hub = new_hub()
    async with serving(hub) as stub:
        watch = stub.Watch(worker_pb2.WatchRequest())
        await watch.read()
        for running in range(100):
            hub.publish_load(WorkerLoad(running=running))
        assert (await first(watch, "load")).load.running == 99


async def test_the_load_is_repeated_where_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "HEARTBEAT_S", 0.03)
    hub = new_hub()
    hub.publish_load(WorkerLoad(running=5))
    async with serving(hub) as stub:
        watch = stub.Watch(worker_pb2.WatchRequest())
        async with asyncio.timeout(60):
            assert [(await first(watch, "load")).load.running for _ in range(3)] == [5, 5, 5]


async def test_a_watcher_that_reads_too_slowly_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "MAX_QUEUED_EVENTS", 3)
    hub = new_hub()
    async with serving(hub) as stub:
        watch = stub.Watch(worker_pb2.WatchRequest())
        await watch.read()
        for number in range(5):
            hub.publish_cache([page_hash(number)], [])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in watch:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        again = await stub.Watch(worker_pb2.WatchRequest()).read()
        assert again.snapshot.cached_hashes == b"".join(page_hash(number) for number in range(5))


async def test_a_large_cache_goes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "MAX_HASHES_PER_MESSAGE", 2)
    hub = new_hub()
    hashes = [page_hash(number) for number in range(5)]
    hub.publish_cache(hashes, [])
    async with serving(hub) as stub:
        watch = stub.Watch(worker_pb2.WatchRequest())
        messages = [await watch.read() for _ in range(3)]
        assert messages[0].snapshot.cached_hashes + messages[1].cache.stored + messages[2].cache.stored == b"".join(
            hashes
        )


async def test_a_watcher_that_leaves_is_forgotten() -> None:
    hub = new_hub()
    watch = hub.Watch(worker_pb2.WatchRequest(), None)
    await anext(watch)
    assert hub.num_watchers == 1
    await watch.aclose()
    assert hub.num_watchers == 0


async def test_an_overflow_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "MAX_QUEUED_EVENTS", 1)
    hub = new_hub()
    watch = hub.Watch(worker_pb2.WatchRequest(), None)
    await anext(watch)
    hub.publish_cache([page_hash(1)], [])
    hub.publish_cache([page_hash(2)], [])
    with pytest.raises(ResourceExhaustedError, match="more than 1 events") as caught:
        await anext(watch)
    assert caught.value.reason == "WATCH_OVERFLOW"


async def test_a_watcher_of_a_worker_without_load_waits_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "HEARTBEAT_S", 0.01)
    hub = new_hub()
    watch = hub.Watch(worker_pb2.WatchRequest(), None)
    await anext(watch)
    waits = 0
    wait = worker_hub._wait

    async def counting(ready: asyncio.Event, until: float) -> None:
        nonlocal waits
        waits += 1
        await wait(ready, until)
        if waits == 5:
            hub.publish_load(WorkerLoad(running=1))

    monkeypatch.setattr(worker_hub, "_wait", counting)
    start = asyncio.get_running_loop().time()
    assert (await anext(watch)).load.running == 1
    assert asyncio.get_running_loop().time() - start > 0.04, "each wait lasts a heartbeat"
