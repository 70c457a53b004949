"""How fast pages go from one process of a host into the pool of another, beside what could be had at most.

    python bench/handoff_rate.py [--tokens 2048] [--rounds 21] [--formats int8,bf16] [--json out.json]

The pages of one prompt, of the packaged model's shape, from their pool to another process's, checksummed, checked and
committed: once through shared memory, beside a plain copy of the same bytes; and once in messages, beside gRPC's own
stream of the same bytes in messages of 1 MiB that nobody looks at. What is compared takes turns, and medians are
printed. A push is timed from its first page to the answer to its commit. Every turn takes the next pages of pools of
the default size, so that no way finds its bytes, or where they go, in a cache.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
import uvloop
from crc32c import crc32c
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import EngineConfig, HandoffConfig, ServerConfig
from pageferry.core.errors import PageferryError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import SampledToken
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.kernels.cpu_library import copy_functions
from pageferry.runtime.channels import open_channel
from pageferry.runtime.frames import FrameKey
from pageferry.runtime.malloc import keep_freed_memory
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.page_wire import add_page_service
from pageferry.runtime.push import PushClient
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.tickets import Grant

SHM_SHARE, INLINE_SHARE = 0.5, 0.8  # of the plain copy, and of gRPC's own stream
MESSAGE_BYTES = 1 << 20
RAW_SERVICE, RAW_METHOD = "bench.Raw", "Take"
FIRST = (0, SampledToken(1, -0.5))


def shape(page_format: str) -> CacheLayout:
    """SmolLM2-135M's."""
    return CacheLayout("bench", PageFormat.parse(page_format), 16, 3, 64, (full_group(30),))


def pages_of(num_pages: int, first: int) -> list[tuple[PageKey, Place]]:
    return [(PageKey(0, page), Place(0, PageId(first + page))) for page in range(num_pages)]


def pool_of(page_format: str, num_pages: int) -> PageTensors:
    """Of the default size, in whole prompts."""
    of = shape(page_format)
    return PageTensors(of, [(EngineConfig().kv_memory_mb << 20) // of.pages[0].page_bytes // num_pages * num_pages], 0)


class OpenDesk:
    """Takes any ticket for the pages from the one that it names."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages

    async def open(self, ticket: bytes, request_id: str, layout: CacheLayout) -> Grant:
        return Grant(ticket, 30_000, dict(pages_of(self._num_pages, int.from_bytes(ticket, "little"))))

    def receive(self, grant: Grant, frames: Sequence[FrameKey]) -> None:
        """Nothing to record."""

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        """All is well."""

    def close(self, grant: Grant, error: PageferryError | None) -> None:
        if error is not None:
            raise error


def take_all(server: grpc.aio.Server) -> None:
    async def take(_: object, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass
        await context.write(b"done")

    handler = grpc.stream_stream_rpc_method_handler(take, request_deserializer=bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(RAW_SERVICE, {RAW_METHOD: handler}),))


async def receive(page_format: str, num_pages: int) -> None:
    """The other process: prints its port, and serves until its input ends."""
    pool = pool_of(page_format, num_pages)
    pool.pools[0].memory.zero_()  # a pool in use has been touched
    with ThreadPoolExecutor(1) as executor:
        async with GrpcServer(ServerConfig(), NoOpTracer()) as server:
            receiver = PageReceiver(OpenDesk(num_pages), pool, executor)
            server.add(add_page_service, receiver, "pageferry.v1.PageService")
            server.add(lambda _, inner: take_all(inner), None, "")
            print(await server.start(), flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


class Sending:
    """A pool of pages, and ways to get its bytes elsewhere, each of which returns the seconds it took."""

    def __init__(
        self, page_format: str, num_pages: int, channel: grpc.aio.Channel, executor: ThreadPoolExecutor
    ) -> None:
        self.pool = pool_of(page_format, num_pages)
        layout = self.pool.layout.pages[0]
        memory = self.pool.pools[0].memory
        self.pool.blank([place for _, place in pages_of(len(memory), 0)])
        elements = memory[:, : layout.num_layers * layout.payload_layer_bytes]
        elements[:] = torch.randint(0, 128, elements.shape, dtype=torch.uint8)
        self.num_bytes = num_pages * layout.num_layers * layout.layer_bytes
        self._num_pages = num_pages
        self._first = 0
        self._pages = memory.numpy()
        self._copy = np.zeros_like(self._pages)
        self._channel = channel
        self._executor = executor
        self._parts_of: dict[str, PushParts] = {}  # by transport

    def _next(self) -> slice:
        self._first = (self._first + self._num_pages) % len(self._pages)
        return slice(self._first, self._first + self._num_pages)

    async def copy(self) -> float:
        taken = self._next()
        start = time.perf_counter()
        np.copyto(self._copy[taken], self._pages[taken])
        return time.perf_counter() - start

    async def checksum(self) -> float:
        taken = self._pages[self._next()].reshape(-1)
        start = time.perf_counter()
        crc32c(taken)
        return time.perf_counter() - start

    async def push(self, transport: str) -> float:
        first = self._next().start
        ticket, pages = first.to_bytes(16, "little"), pages_of(self._num_pages, first)
        async with PushClient(self._channel, ticket, "", self._parts(transport), lambda places: None) as push:
            await push.open()
            start = time.perf_counter()
            await push.ship(pages)
            await push.commit(0, FIRST)
            return time.perf_counter() - start

    async def stream(self) -> float:
        taken = self._pages[self._next()].reshape(-1)
        messages = [taken[i : i + MESSAGE_BYTES].tobytes() for i in range(0, len(taken), MESSAGE_BYTES)]

        async def requests() -> Any:
            for message in messages:
                yield message

        call = self._channel.stream_stream(f"/{RAW_SERVICE}/{RAW_METHOD}")
        start = time.perf_counter()
        async for _ in call(requests()):
            return time.perf_counter() - start
        raise AssertionError("no answer")

    def _parts(self, transport: str) -> PushParts:
        if transport not in self._parts_of:
            config = HandoffConfig(transport=transport)
            self._parts_of[transport] = PushParts(self.pool, self._executor, config, NoOpTracer())
        return self._parts_of[transport]


async def in_turns(ways: Sequence[Callable[[], Awaitable[float]]], num_rounds: int) -> list[list[float]]:
    """Seconds of each way; the first round, which warms them up, does not count."""
    times = [[await way() for way in ways] for _ in range(num_rounds + 1)]
    return [list(column) for column in zip(*times[1:], strict=True)]


def report(
    name: str, sending: Sending, taken: list[list[float]], names: tuple[str, str], share: float
) -> dict[str, Any]:
    rates = [sending.num_bytes / statistics.median(times) / 1e9 for times in taken]
    # Of neighbours: what slows a whole round down slows both.
    ratio = statistics.median(base / ours for ours, base in zip(taken[1], taken[0], strict=True))
    verdict = "ok" if ratio >= share else "below"
    print(
        f"{name:5} {sending.num_bytes} bytes: {names[1]} {rates[1]:.2f} GB/s, {names[0]} {rates[0]:.2f} GB/s, "
        f"{ratio:.2f} of it ({share} is wanted: {verdict})",
        flush=True,
    )
    return {"format": name, "bytes": sending.num_bytes, names[0]: rates[0], names[1]: rates[1], "ratio": ratio}


async def measure(page_format: str, num_pages: int, num_rounds: int, port: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(1) as executor:
        async with open_channel(f"127.0.0.1:{port}", NoOpTracer()) as channel:
            sending = Sending(page_format, num_pages, channel, executor)
            staged = await in_turns((sending.copy, lambda: sending.push("shm")), num_rounds)
            inline = await in_turns((sending.stream, lambda: sending.push("inline")), num_rounds)
            (checksums,) = await in_turns((sending.checksum,), num_rounds)
    rate = sending.num_bytes / statistics.median(checksums) / 1e9
    print(f"{page_format:5} crc32c alone, by its package: {rate:.2f} GB/s", flush=True)
    return [
        report(page_format, sending, staged, ("plain copy", "shared memory"), SHM_SHARE),
        report(page_format, sending, inline, ("gRPC stream", "inline"), INLINE_SHARE),
    ]


def run(page_format: str, num_pages: int, num_rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--receive", page_format, "--tokens", str(num_pages * 16)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        figures = uvloop.run(measure(page_format, num_pages, num_rounds, int(other.stdout.readline())))
        other.stdin.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--formats", default="int8,bf16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_pages = options.tokens // 16
    keep_freed_memory()  # as workers do
    if options.receive:
        uvloop.run(receive(options.receive, num_pages))
        return 0
    level = copy_functions()
    print(
        f"handoff_rate: {num_pages} pages, copies in C: {'no' if level is None else f'level {level.level}'}", flush=True
    )
    figures = [figure for name in options.formats.split(",") for figure in run(name, num_pages, options.rounds)]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
