"""Eight requests that live at once and begin alike: how many pages and bytes they hold together."""

import asyncio
from dataclasses import dataclass

from cluster import POLL_S, Stub, greedy, wait_idle

from pageferry.runtime.convert import layout_from_proto
from pageferry.v1 import inference_pb2 as pb

PATIENCE_S = 240


@dataclass
class Sharing:
    """Pages in use on the only decode worker, and the tokens that lie in them: equal ones once, and each one's own."""

    pages: int
    shared_tokens: int
    own_tokens: int
    kv_bytes: int


async def pages_of_eight(stub: Stub, shared: list[int], own: list[list[int]], max_tokens: int) -> Sharing:
    """Begin one request, then the seven others while it runs; look when all run.

    `max_tokens` must be so many that the first has not ended when the last begins.
    """
    before = decode_worker(await wait_idle(stub)).load
    calls = []
    try:
        for ids in own:
            call = stub.Generate(greedy(shared + ids, max_tokens), timeout=300)
            calls.append(call)
            num_tokens = 0
            while len(calls) == 1 and num_tokens < 2:  # the second one follows the commit: its pages can be found
                num_tokens += len((await call.read()).delta.tokens)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                worker = decode_worker(await stub.GetStatus(pb.GetStatusRequest()))
                load = worker.load
                if load.running == len(own):
                    break
                await asyncio.sleep(POLL_S)
    finally:
        for call in calls:
            call.cancel()
    await wait_idle(stub)
    num_generated = load.generated_tokens - before.generated_tokens
    layout = layout_from_proto(worker.layout)
    in_use = [pool.pages_total - pool.pages_free - pool.pages_cached for pool in load.pools]
    page_bytes = [pages.page_bytes for pages in layout.pages]
    if layout.tails:
        page_bytes.append(sum(tails.page_bytes for tails in layout.tails))
    kv_bytes = sum(number * size for number, size in zip(in_use, page_bytes, strict=True))
    return Sharing(sum(in_use), len(shared), sum(map(len, own)) + num_generated, kv_bytes)


def decode_worker(status: pb.GetStatusResponse) -> pb.WorkerStatus:
    (worker,) = (worker for worker in status.workers if worker.role == "decode")
    return worker
