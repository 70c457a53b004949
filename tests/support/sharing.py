"""Eight requests that live at once and begin alike: how many pages they hold together."""

import asyncio
from dataclasses import dataclass

from cluster import POLL_S, Stub, greedy, wait_idle

from pageferry.v1 import inference_pb2 as pb

MAX_TOKENS = 1000  # none ends before it is looked at
PATIENCE_S = 240


@dataclass
class Sharing:
    """Pages in use on the only decode worker, and the tokens that lie in them: equal ones once, and each one's own."""

    pages: int
    shared_tokens: int
    own_tokens: int


async def pages_of_eight(stub: Stub, shared: list[int], own: list[list[int]]) -> Sharing:
    """Begin one request, then the seven others while it runs; look when all run."""
    before = decode_load(await wait_idle(stub))
    calls = []
    try:
        for ids in own:
            call = stub.Generate(greedy(shared + ids, MAX_TOKENS), timeout=300)
            calls.append(call)
            num_tokens = 0
            while len(calls) == 1 and num_tokens < 2:  # the second one follows the commit: its pages can be found
                num_tokens += len((await call.read()).delta.tokens)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                load = decode_load(await stub.GetStatus(pb.GetStatusRequest()))
                if load.running == len(own):
                    break
                await asyncio.sleep(POLL_S)
    finally:
        for call in calls:
            call.cancel()
    await wait_idle(stub)
    num_generated = load.generated_tokens - before.generated_tokens
    in_use = load.pages_total - load.pages_free - load.pages_cached
    return Sharing(in_use, len(shared), sum(map(len, own)) + num_generated)


def decode_load(status: pb.GetStatusResponse) -> pb.WorkerLoad:
    (load,) = (worker.load for worker in status.workers if worker.role == "decode")
    return load
