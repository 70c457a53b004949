"""The other end of a hand-off through shared memory, in a process to be killed: `send ADDRESS DIR` or `receive DIR`.

A sender ships one page of three and hangs; a receiver prints its port, and hangs too.
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opentelemetry.trace import NoOpTracer
from pages import REQUEST, TICKET, FakeDesk, MemoryPages, numbered, small_layout

from pageferry.core.config import HandoffConfig, ServerConfig
from pageferry.runtime.channels import open_channel
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.page_wire import add_page_service
from pageferry.runtime.push import PushClient
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.shared_regions import SharedRegions
from pageferry.runtime.staging import OwnRegions


async def send(address: str, directory: Path) -> None:
    source = MemoryPages(small_layout(), 3, seed=1)
    with ThreadPoolExecutor(1) as executor:
        parts = PushParts(source, executor, HandoffConfig(transport="shm"), NoOpTracer(), SharedRegions(directory))
        async with (
            open_channel(address, NoOpTracer()) as channel,
            PushClient(channel, TICKET, REQUEST, parts, lambda places: None) as push,
        ):
            await push.open()
            await push.ship(numbered(1))
            await asyncio.Event().wait()


async def receive(directory: Path) -> None:
    layout = small_layout()
    with ThreadPoolExecutor(1) as executor:
        async with GrpcServer(ServerConfig(), NoOpTracer()) as server:
            regions = OwnRegions(executor, 30, directory=directory)
            desk, sink = FakeDesk(layout, numbered(3)), MemoryPages(layout, 3)
            service = PageReceiver(desk, sink, executor, HandoffConfig(), regions)
            server.add(add_page_service, service, "pageferry.v1.PageService")
            print(await server.start(), flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    role, *arguments, where = sys.argv[1:]
    asyncio.run(send(arguments[0], Path(where)) if role == "send" else receive(Path(where)))
