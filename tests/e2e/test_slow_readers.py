"""Fifty clients that read a message a second, and two that stop, over gRPC and HTTP, through real processes."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, Stub, connected, generate, greedy, running, wait_idle

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

NUM_SLOW = 50
NUM_TOKENS = 2000
MAX_GROWTH_MB = 64
STUCK_S = 30.0  # without a token of any stream, while each slow reader takes a message a second


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[Cluster]:
    settings = {"engine.num_pages": str((NUM_SLOW + 4) * (NUM_TOKENS // 16 + 4)), "scheduler.max_num_seqs": "64"}
    with running("--prefill", "0", "--decode", "1", "--model", str(tiny_model), settings=settings) as cluster:
        yield cluster


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(kilobytes) / 1000


@contextlib.asynccontextmanager
async def slow_reader(cluster: Cluster, number: int, pause_s: float | None) -> AsyncIterator[None]:
    """One on its own connection, with little room on the way; without a pause it stops after its first message."""
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))

    async def read() -> None:
        await call.read()
        while pause_s is not None and await call.read() is not grpc.aio.EOF:  # noqa: ASYNC110 - it is slow
            await asyncio.sleep(pause_s)

    async with grpc.aio.insecure_channel(cluster.address, options=options) as channel:
        request = greedy([number % 250 + 4] * 40, NUM_TOKENS)
        request.sampling.logprobs = 20
        call = InferenceServiceStub(channel).Generate(request)
        reading = asyncio.create_task(read())
        try:
            yield
        finally:
            reading.cancel()
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_reader_over_http(cluster: Cluster, number: int, pause_s: float | None) -> AsyncIterator[None]:
    """The same of a stream of events."""

    async def read() -> None:
        await reader.readline()
        while pause_s is not None and await reader.readline():  # noqa: ASYNC110 - it is slow
            await asyncio.sleep(pause_s)

    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", cluster.http_port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**16)
    body = {"prompt": [number % 250 + 4] * 40, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"logprobs": 20, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(content), content))
    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.close()


async def generated(stub: Stub) -> int:
    status = await stub.GetStatus(pb.GetStatusRequest())
    return sum(worker.load.generated_tokens for worker in status.workers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.field("grpc/grpc#37715", "grpc/grpc#11966")
async def test_slow_readers_hold_up_nobody_and_cost_bounded_memory(cluster: Cluster) -> None:
    (router,) = cluster.pids("router")
    async with connected(cluster) as stub, contextlib.AsyncExitStack() as readers:
        await generate(stub, greedy([9] * 40, 200))
        before_mb, before = resident_mb(router), await generated(stub)
        for number in range(0, NUM_SLOW, 2):
            await readers.enter_async_context(slow_reader(cluster, number, 1.0))
            await readers.enter_async_context(slow_reader_over_http(cluster, number + 1, 1.0))
        await readers.enter_async_context(slow_reader(cluster, NUM_SLOW, None))
        await readers.enter_async_context(slow_reader_over_http(cluster, NUM_SLOW + 1, None))
        done, moved = 0, time.monotonic()
        while done < (NUM_SLOW + 2) * NUM_TOKENS:
            earlier, done = done, await generated(stub) - before
            moved = time.monotonic() if done > earlier else moved
            assert time.monotonic() < moved + STUCK_S, f"stuck after {done} tokens: a slow reader holds the worker up"
            await asyncio.sleep(0.2)
        grown_mb = resident_mb(router) - before_mb
        began = time.monotonic()
        fast = await generate(stub, greedy([8] * 40, 500))  # all that is slow is still there
        assert len(fast.token_ids) == 500
        assert grown_mb < MAX_GROWTH_MB
        print(f"grown {grown_mb:.1f} MB, fast {time.monotonic() - began:.1f} s")
        await readers.aclose()
        await wait_idle(stub)
