"""Shared memory between the ends of a hand-off: who may attach, when it isn't there, and that nothing is left."""

import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import staging_peer
from crc32c import crc32c
from opentelemetry.trace import NoOpTracer
from pages import REQUEST, TICKET, FakeDesk, MemoryPages, numbered, small_layout

from pageferry.core.config import HandoffConfig, ServerConfig
from pageferry.core.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    PageferryError,
    UnavailableError,
)
from pageferry.runtime import staging
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.page_wire import add_page_service, push_call
from pageferry.runtime.push import PushClient
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.shared_regions import SharedRegion, SharedRegions
from pageferry.runtime.staging import OwnRegion, OwnRegions, remove_stale
from pageferry.v1 import page_pb2

LAYOUT = small_layout()
WHOLE = LAYOUT.num_layers * LAYOUT.pages[0].layer_bytes


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[OwnRegions]:
    with ThreadPoolExecutor(1) as executor:
        yield OwnRegions(executor, 30, directory=tmp_path)


class ReachedDesk(FakeDesk):
    address = ""  # of its server


@asynccontextmanager
async def receiver(
    regions: OwnRegions, transport: str = "auto", num_pages: int = 3
) -> AsyncIterator[tuple[ReachedDesk, MemoryPages, grpc.aio.Channel]]:
    desk, sink = ReachedDesk(LAYOUT, numbered(num_pages)), MemoryPages(LAYOUT, num_pages)
    with ThreadPoolExecutor(1) as executor:
        async with GrpcServer(ServerConfig(), NoOpTracer()) as server:
            service = PageReceiver(desk, sink, executor, HandoffConfig(transport=transport), regions)
            server.add(add_page_service, service, "pageferry.v1.PageService")
            address = f"127.0.0.1:{await server.start()}"
            async with open_channel(address, NoOpTracer()) as channel:
                desk.address = address
                yield desk, sink, channel


async def push_all(
    channel: grpc.aio.Channel, directory: Path, transport: str = "auto", *, num_pages: int = 3
) -> tuple[MemoryPages, str]:
    """Push the pages; what was sent, and how."""
    source = MemoryPages(LAYOUT, num_pages, seed=1)
    with ThreadPoolExecutor(1) as executor:
        config = HandoffConfig(transport=transport)
        parts = PushParts(source, executor, config, NoOpTracer(), SharedRegions(directory))
        async with PushClient(channel, TICKET, REQUEST, parts, lambda places: None) as push:
            await push.open()
            assert names(directory) == [] or transport != "shm", "its name goes once it is attached"
            await push.ship(numbered(num_pages))
            await push.commit(12, None)
            return source, push.transport


class Raw:
    """A sender that does what a test wants."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = push_call(channel)()
        self.region: SharedRegion | None = None

    async def open(self, **staging_request: bytes) -> page_pb2.Opened:
        opening = page_pb2.Open(ticket=TICKET, request_id=REQUEST, layout=layout_to_proto(LAYOUT))
        opening.staging.CopyFrom(page_pb2.StagingRequest(**staging_request))
        await self.call.write(page_pb2.PushRequest(open=opening))
        return page_pb2.Opened.FromString((await self.read()).opened.SerializeToString())

    async def attach(self, opened: page_pb2.Opened, directory: Path) -> SharedRegion:
        self.region = SharedRegion.attach(opened.staging, directory)
        assert self.region is not None
        await self.send(attached=page_pb2.StagingAttached(proof=self.region.proof))
        return self.region

    async def send(self, **message: Any) -> None:
        await self.call.write(page_pb2.PushRequest(**message))

    async def stage(self, source: MemoryPages, **changes: Any) -> None:
        """All three pages, from the region's first slot."""
        assert self.region is not None
        offset = staging.HEADER_BYTES
        checksums = []
        for index, (key, place) in enumerate(numbered(3)):
            data = source.read(key, place, 0, LAYOUT.num_layers)
            self.region.memory[offset + index * WHOLE :][: len(data)] = data
            checksums.append(crc32c(data))
        fields = {"page_indexes": [0, 1, 2], "offset": offset, "crc32c": checksums}
        await self.send(staged=page_pb2.StagedPages(**{**fields, **changes}))

    async def read(self) -> Any:
        return await anext(self.call)

    async def failure(self) -> PageferryError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(60):
                while True:
                    await self.read()
        return from_rpc_error(caught.value)


async def push_again(desk: Any, channel: Any, parts: PushParts) -> str:
    """A whole push of three pages, which the desk has not seen before; its transport."""
    desk.grant, desk.frames = None, []
    async with PushClient(channel, TICKET, REQUEST, parts, lambda places: None) as push:
        await push.open()
        await push.ship(numbered(3))
        await push.commit(12, None)
        return push.transport


async def test_a_region_serves_one_push_after_another_and_leaves_no_name(regions: OwnRegions, tmp_path: Path) -> None:
    source = MemoryPages(LAYOUT, 3, seed=1)
    with ThreadPoolExecutor(1) as executor:
        parts = PushParts(source, executor, HandoffConfig(transport="shm"), NoOpTracer(), SharedRegions(tmp_path))
        async with receiver(regions) as (desk, sink, channel):
            for _ in range(3):
                await push_again(desk, channel, parts)
                assert names(tmp_path) == []
                assert len(regions) == 1
            assert sink.pages == source.pages


async def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    region = OwnRegion.create(tmp_path, staging.REGION_BYTES)
    (name,) = names(tmp_path)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    region.unlink()
    region.unlink()
    assert names(tmp_path) == []


@pytest.mark.parametrize("change", ["name", "nonce", "num_bytes", "path", "mode", "small"])
async def test_what_is_not_the_receivers_own_is_not_attached(tmp_path: Path, change: str) -> None:
    region = OwnRegion.create(tmp_path, staging.REGION_BYTES)
    offer = page_pb2.StagingOffer.FromString(region.offer.SerializeToString())
    match change:
        case "name":
            offer.name = offer.name[:-1]
        case "nonce":
            offer.nonce = bytes(16)
        case "num_bytes":
            offer.num_bytes += 1
        case "path":
            offer.name = f"../{tmp_path.name}/{offer.name}"
        case "mode":
            (tmp_path / offer.name).chmod(0o644)
        case "small":
            offer.num_bytes = staging.HEADER_BYTES
    assert SharedRegion.attach(offer, tmp_path) is None
    (tmp_path / region.offer.name).chmod(0o600)
    assert SharedRegion.attach(region.offer, tmp_path) is not None
    assert names(tmp_path) == []
    region.unlink()


@pytest.mark.parametrize("where", ["no directory", "full", "another host's"])
async def test_without_shared_memory_pages_come_inline(tmp_path: Path, where: str) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    for path in (own, others):
        path.mkdir()
    with ThreadPoolExecutor(1) as executor:
        directory = tmp_path / "none" if where == "no directory" else own
        num_bytes = 1 << 60 if where == "full" else staging.REGION_BYTES
        regions = OwnRegions(executor, 30, directory=directory, num_bytes=num_bytes)
        async with receiver(regions) as (_, sink, channel):
            source, transport = await push_all(channel, others if where == "another host's" else own)
            assert (sink.pages, transport) == (source.pages, "inline")
            assert names(own) == names(others) == []
        async with receiver(regions) as (desk, _, channel):
            with pytest.raises(FailedPreconditionError, match=r"handoff.transport is shm"):
                await push_all(channel, others if where == "another host's" else own, "shm")
            await desk.has_closed.wait()
        assert names(own) == names(others) == []
        assert len(regions) == 0


class CountedRegions(OwnRegions):
    num_borrowed = 0

    async def borrow(self, proof: bytes) -> OwnRegion | None:
        self.num_borrowed += 1
        return await super().borrow(proof)


async def test_a_sender_that_could_not_attach_does_not_ask_again(tmp_path: Path) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    for path in (own, others):
        path.mkdir()
    source = MemoryPages(LAYOUT, 3, seed=1)
    with ThreadPoolExecutor(1) as executor:
        regions = CountedRegions(executor, 30, directory=own)
        parts = PushParts(source, executor, HandoffConfig(), NoOpTracer(), SharedRegions(others))
        async with receiver(regions) as (desk, sink, channel):
            for _ in range(2):
                assert await push_again(desk, channel, parts) == "inline"
            assert sink.pages == source.pages
    assert regions.num_borrowed == 1


async def test_regions_are_bounded_however_many_ask_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        regions = OwnRegions(executor, 30, directory=tmp_path, num_bytes=staging.HEADER_BYTES)
        borrowed = await asyncio.gather(*(regions.borrow(b"") for _ in range(staging.MAX_REGIONS + 3)))
        there = [region for region in borrowed if region is not None]
        assert len(there) == len(regions) == staging.MAX_REGIONS
        for region in there:
            regions.give_back(region)
        assert len(regions) == 0
    assert names(tmp_path) == []


async def test_each_end_can_insist(regions: OwnRegions, tmp_path: Path) -> None:
    async with receiver(regions, "inline") as (_, _, channel):
        assert (await push_all(channel, tmp_path))[1] == "inline"
    async with receiver(regions, "shm") as (desk, _, channel):
        with pytest.raises(FailedPreconditionError, match="the sender asks for none"):
            await push_all(channel, tmp_path, "inline")
        assert desk.grant is None, "the ticket is as it was"
        assert (await push_all(channel, tmp_path))[1] == "shm"


async def test_a_wrong_proof_ends_the_push(regions: OwnRegions, tmp_path: Path) -> None:
    async with receiver(regions) as (desk, _, channel):
        raw = Raw(channel)
        await raw.open()
        assert len(names(tmp_path)) == 1
        await raw.send(attached=page_pb2.StagingAttached(proof=bytes(16)))
        assert isinstance(await raw.failure(), InvalidArgumentError)
        await desk.has_closed.wait()
        assert names(tmp_path) == []
        assert len(regions) == 0


async def test_a_sender_that_can_not_attach_goes_on_inline(regions: OwnRegions, tmp_path: Path) -> None:
    async with receiver(regions) as (_, _, channel):
        raw = Raw(channel)
        await raw.open(proof=b"of no region")
        await raw.send(attached=page_pb2.StagingAttached())
        await raw.send(staged=page_pb2.StagedPages(page_indexes=[0], offset=4096, crc32c=[0]))
        error = await raw.failure()
        assert "staged pages came without a staging region" in error.message
        assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 0}, "staged.offset is 0"),
        ({"offset": staging.REGION_BYTES - 3 * WHOLE + 1}, "staged.offset is"),
        ({"offset": 2**63}, "staged.offset is"),
        ({"crc32c": [1]}, "staged.crc32c is '1 checksums'"),
        ({"page_indexes": [], "crc32c": []}, "staged.page_indexes is"),
        ({"page_indexes": [0, 1, 3]}, "page 3 of group 0"),
        ({"page_indexes": [0, 1, 1]}, "came before"),
        ({"group": 1}, "group is 1"),
        ({"kind": 3}, "is none that this version knows"),
    ],
)
async def test_staged_pages_that_do_not_fit_are_refused(
    regions: OwnRegions, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    async with receiver(regions) as (desk, _, channel):
        raw = Raw(channel)
        await raw.attach(await raw.open(), tmp_path)
        await raw.stage(MemoryPages(LAYOUT, 3, seed=1), **changes)
        error = await raw.failure()
        assert isinstance(error, InvalidArgumentError)
        assert message in error.message
        await desk.has_closed.wait()
        assert desk.frames == []


async def test_a_bit_flipped_in_staging_is_data_loss(regions: OwnRegions, tmp_path: Path) -> None:
    async with receiver(regions) as (desk, _, channel):
        raw = Raw(channel)
        await raw.attach(await raw.open(), tmp_path)
        source = MemoryPages(LAYOUT, 3, seed=1)
        good = [crc32c(source.read(key, place, 0, LAYOUT.num_layers)) for key, place in numbered(3)]
        source.pages[numbered(3)[1][1]][5] ^= 4
        await raw.stage(source, crc32c=good)
        error = await raw.failure()
        assert isinstance(error, DataLossError)
        assert "page 1 of group 0" in error.message
        await desk.has_closed.wait()
        assert desk.frames == []


async def test_a_sender_that_writes_on_can_not_touch_pages(regions: OwnRegions, tmp_path: Path) -> None:
    source = MemoryPages(LAYOUT, 3, seed=1)
    async with receiver(regions) as (desk, sink, channel):
        raw = Raw(channel)
        region = await raw.attach(await raw.open(), tmp_path)
        await raw.stage(source)
        assert (await raw.read()).acked.frames == 3
        region.memory[staging.HEADER_BYTES : staging.HEADER_BYTES + 3 * WHOLE] = bytes(3 * WHOLE)
        assert sink.pages == source.pages
        raw.call.cancel()
        await desk.has_closed.wait()
        region.memory[staging.HEADER_BYTES : staging.HEADER_BYTES + 3 * WHOLE] = bytes([255]) * (3 * WHOLE)
        assert sink.pages == source.pages


async def test_an_idle_region_is_dropped_and_the_next_push_gets_another(tmp_path: Path) -> None:
    source = MemoryPages(LAYOUT, 3, seed=1)
    with ThreadPoolExecutor(1) as executor:
        regions = OwnRegions(executor, 0, directory=tmp_path)
        parts = PushParts(source, executor, HandoffConfig(transport="shm"), NoOpTracer(), SharedRegions(tmp_path))
        async with receiver(regions) as (desk, _, channel):
            for _ in range(2):
                await push_again(desk, channel, parts)
                await desk.has_closed.wait()
                while len(regions):  # noqa: ASYNC110 - a timer's doing
                    await asyncio.sleep(0.001)


def test_room_is_found_side_by_side_and_can_be_given_back(tmp_path: Path) -> None:
    region = SharedRegion.attach(OwnRegion.create(tmp_path, staging.REGION_BYTES).offer, tmp_path)
    assert region is not None
    unit, num_units = staging.UNIT_BYTES, staging.NUM_UNITS
    starts = [region.take(unit - 1) for _ in range(num_units)]
    assert starts == [staging.HEADER_BYTES + index * unit for index in range(num_units)]
    assert region.take(1) is None
    event = asyncio.Event()
    region.waiting.add(event)
    for index in (3, 5, 6):
        region.give_back(staging.HEADER_BYTES + index * unit, unit - 1)
    assert event.is_set()
    assert region.take(3 * unit) is None
    assert region.take(unit + 1) == staging.HEADER_BYTES + 5 * unit
    assert region.take(unit) == staging.HEADER_BYTES + 3 * unit
    assert region.take(1) is None


def test_names_of_the_dead_are_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    (tmp_path / "pageferry-dead").write_bytes(b"")
    (tmp_path / "another's").write_bytes(b"")
    living = OwnRegion.create(tmp_path, staging.REGION_BYTES)
    remove_stale(tmp_path)
    assert names(tmp_path) == sorted(["another's", living.offer.name])
    living.unlink()


DIES = """
import os, sys
from pathlib import Path
from pageferry.runtime.staging import OwnRegion, REGION_BYTES
region = OwnRegion.create(Path(sys.argv[1]), REGION_BYTES)
print(region.offer.name, flush=True)
sys.stdin.read()
"""


def test_the_name_of_a_killed_receiver_is_removed_by_the_next(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", DIES, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        remove_stale(tmp_path)
        assert names(tmp_path) == [name], "it lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
        remove_stale(tmp_path)
        assert names(tmp_path) == []


@contextmanager
def peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`staging_peer.py` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(Path(staging_peer.__file__)), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_sender_killed_in_its_push_leaves_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        regions = OwnRegions(executor, 0, directory=tmp_path)
        async with receiver(regions) as (desk, _, _), asyncio.timeout(60):
            with peer("send", desk.address, str(tmp_path)) as process:
                while not desk.frames:  # noqa: ASYNC110 - another process's doing
                    await asyncio.sleep(0.005)
                assert names(tmp_path) == []
                process.kill()
                await desk.has_closed.wait()
            assert len(desk.closed) == 1
            assert isinstance(desk.closed[0], PageferryError)
            assert len(desk.frames) == 1
            while len(regions):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert names(tmp_path) == []


async def test_a_receiver_killed_in_a_push_leaves_nothing(tmp_path: Path) -> None:
    source, released = MemoryPages(LAYOUT, 3, seed=1), []
    with ThreadPoolExecutor(1) as executor, peer("receive", str(tmp_path)) as process:
        assert process.stdout is not None
        port = await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
        shared = SharedRegions(tmp_path)
        parts = PushParts(source, executor, HandoffConfig(transport="shm"), NoOpTracer(), shared)
        async with open_channel(f"127.0.0.1:{port.strip()}", NoOpTracer()) as channel:
            async with PushClient(channel, TICKET, REQUEST, parts, released.extend) as push:
                await push.open()
                await push.ship(numbered(2))
                process.kill()
                async with asyncio.timeout(60):
                    await push.broken.wait()
                with pytest.raises(UnavailableError):
                    await push.ship(numbered(3)[2:])
            region = shared.get(channel)
            assert region is not None
            whole = staging.NUM_UNITS * staging.UNIT_BYTES
            assert region.take(whole + 1) is None
            assert region.take(whole) == staging.HEADER_BYTES, "all of it was given back"
    executor.shutdown()
    await asyncio.sleep(0)
    assert sorted(place.page for place in released) == [0, 1, 2]
    assert names(tmp_path) == []


def mapped(directory: Path) -> list[str]:
    """Regions that this process has in its memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]


async def until_unmapped(directory: Path) -> None:
    async with asyncio.timeout(60):
        while mapped(directory):
            gc.collect()
            await asyncio.sleep(0.005)


async def test_the_memory_of_a_receiver_killed_between_pushes_goes_back(tmp_path: Path) -> None:
    source = MemoryPages(LAYOUT, 3, seed=1)
    with ThreadPoolExecutor(1) as executor, peer("receive", str(tmp_path)) as process:
        assert process.stdout is not None
        port = await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
        config = HandoffConfig(transport="shm", lease_ms=50)
        parts = PushParts(source, executor, config, NoOpTracer(), SharedRegions(tmp_path))
        async with open_channel(f"127.0.0.1:{port.strip()}", NoOpTracer()) as channel:
            async with PushClient(channel, TICKET, REQUEST, parts, lambda places: None) as push:
                await push.open()
                await push.ship(numbered(3))
                await push.commit(12, None)
                assert len(mapped(tmp_path)) == 1
            del push
            process.kill()
            await until_unmapped(tmp_path)
            assert parts.regions.get(channel) is None


async def test_a_region_in_use_is_kept_however_long(tmp_path: Path) -> None:
    source = MemoryPages(LAYOUT, 3, seed=1)
    with ThreadPoolExecutor(1) as executor:
        regions = OwnRegions(executor, 60, directory=tmp_path)
        config = HandoffConfig(transport="shm", lease_ms=1)
        parts = PushParts(source, executor, config, NoOpTracer(), SharedRegions(tmp_path))
        async with receiver(regions) as (desk, _, channel):
            await push_again(desk, channel, parts)
            desk.grant, desk.frames = None, []
            async with PushClient(channel, TICKET, REQUEST, parts, lambda places: None) as push:
                await push.open()
                region = parts.regions.get(channel)
                assert region is not None
                await asyncio.sleep(0.05)
                assert parts.regions.get(channel) is region
                await push.ship(numbered(3))
                await push.commit(12, None)
            while parts.regions.get(channel) is not None:  # noqa: ASYNC110 - a timer's doing
                await asyncio.sleep(0.001)
