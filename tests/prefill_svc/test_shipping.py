"""Shipments that get nowhere, and the channels that they use."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import LAYOUT, FakePages
from opentelemetry.sdk.trace import TracerProvider

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import PageferryError
from pageferry.core.layout import PageKey, Place
from pageferry.core.pool import PageId
from pageferry.core.sender import HandoffStats
from pageferry.prefill_svc.shipping import DecodeChannels, Shipment
from pageferry.runtime.channels import open_channel
from pageferry.runtime.page_transfer import PushParts
from pageferry.v1.prefill_pb2 import HandoffTarget

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("test")
PAGES = [(PageKey(0, index), Place(0, PageId(3 + index))) for index in range(3)]


class FakeChannel:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Ledger:
    """What a shipment tells its owner."""

    def __init__(self) -> None:
        self.given_back: list[Place] = []
        self.outcomes: list[HandoffStats | PageferryError] = []

    def give_back(self, places: Sequence[Place]) -> None:
        self.given_back += places


@pytest.fixture
def dead_endpoint() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def parts() -> Iterator[PushParts]:
    with ThreadPoolExecutor(1) as executor:
        yield PushParts(FakePages(LAYOUT, 8), executor, HandoffConfig(), TRACER)


def make(endpoint: str, parts: PushParts, ledger: Ledger) -> tuple[Shipment, DecodeChannels]:
    channels = DecodeChannels(lambda address: open_channel(address, TRACER))
    target = HandoffTarget(ticket=b"t" * 16, kv_endpoint=endpoint)
    return Shipment(channels, target, "request", parts, ledger.give_back, ledger.outcomes.append), channels


async def test_a_decode_worker_that_is_not_there_is_named_and_all_pages_come_back(
    dead_endpoint: str, parts: PushParts
) -> None:
    ledger = Ledger()
    shipment, channels = make(dead_endpoint, parts, ledger)
    task = shipment.start()
    shipment.add(PAGES[:2])
    async with asyncio.timeout(60):
        await task
    (error,) = ledger.outcomes
    assert isinstance(error, PageferryError)
    assert (error.code, error.retryable) == ("UNAVAILABLE", True)
    assert dead_endpoint in error.message
    shipment.add(PAGES[2:])
    assert sorted(place.page for place in ledger.given_back) == [3, 4, 5]
    await channels.close_idle(0)


@pytest.mark.parametrize("started", [False, True])
async def test_a_shipment_cancelled_at_once_gives_its_pages_back_and_says_nothing(
    dead_endpoint: str, parts: PushParts, started: bool
) -> None:
    ledger = Ledger()
    shipment, channels = make(dead_endpoint, parts, ledger)
    task = shipment.start() if started else None
    shipment.add(PAGES[:2])
    shipment.cancel()
    shipment.add(PAGES[2:])
    assert sorted(place.page for place in ledger.given_back) == [3, 4, 5]
    if task is not None:
        await asyncio.wait([task])
    assert ledger.outcomes == []
    await channels.close_idle(0)


async def test_channels_are_kept_for_the_next_push_and_the_oldest_idle_ones_are_closed() -> None:
    opened: list[FakeChannel] = []

    def open_fake(endpoint: str) -> Any:
        opened.append(FakeChannel(endpoint))
        return opened[-1]

    channels = DecodeChannels(open_fake)
    with channels.use("a") as first, channels.use("a") as second:
        assert first is second
        with channels.use("b"), channels.use("c"):
            pass
        await channels.close_idle(num_kept=1)
    assert [(channel.endpoint, channel.closed) for channel in opened] == [("a", False), ("b", True), ("c", False)]
    with channels.use("b"):
        pass
    assert [channel.endpoint for channel in opened] == ["a", "b", "c", "b"]
    await channels.close_idle(0)
    assert all(channel.closed for channel in opened)
