"""Random load, cancels, deadlines and kills against a small model; afterwards nothing may be left in use.

    python tests/faults/soak.py --seed 1 --seconds 60

The seed fixes what is asked for and when workers are killed; how that meets on the machine's clock is not fixed.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import grpc
from cluster import Cluster, Stub, connected, generate, running, wait_idle
from tiny_model import write_tiny_model

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

ALLOWED = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}  # what a request may end with, beside success
NUM_CLIENTS = 24
SETTINGS = {
    "engine.num_pages": "400",
    "scheduler.chunk_tokens": "64",
    "scheduler.max_num_seqs": "12",
    "handoff.lease_ms": "2000",
    "router.max_queue": "20",
}


def draw_request(draws: random.Random) -> pb.GenerateRequest:
    """Prompts share beginnings often, so that prefix caches are in play."""
    prefix = [5 + draws.randrange(3)] * draws.choice((0, 16, 48, 160))
    tail = [draws.randrange(4, 320) for _ in range(draws.choice((1, 15, 16, 17, 100, 400)))]
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prefix + tail),
        sampling=SamplingParams(temperature=draws.choice((0.0, 1.0)), seed=draws.randrange(1000)),
        stop=StopConditions(max_tokens=draws.choice((1, 2, 20, 200)), ignore_eos=draws.random() < 0.5),
        priority=draws.choice((0, 0, 0, -1, 1)),
    )


async def one_request(stub: Stub, draws: random.Random) -> str:
    """How one request ended: OK, cancelled by us, or its status."""
    request, roll = draw_request(draws), draws.random()
    try:
        if roll < 0.3:
            call = stub.Generate(request, timeout=30)
            try:
                for _ in range(draws.randrange(12)):
                    if await call.read() is grpc.aio.EOF:
                        break
            finally:
                call.cancel()
            return "cancelled"
        timeout_s = draws.uniform(0.01, 0.5) if roll < 0.4 else 30
        await generate(stub, request, timeout_s=timeout_s)
        return "OK"
    except grpc.aio.AioRpcError as error:
        if error.code().name not in ALLOWED:
            raise AssertionError(f"{error.code().name}: {error.details()}") from None
        return str(error.code().name)


async def client(stub: Stub, seed: int, end: float, outcomes: Counter[str]) -> None:
    draws = random.Random(seed)
    while time.monotonic() < end:
        how = await one_request(stub, draws)
        outcomes[how] += 1
        if how in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            await asyncio.sleep(draws.uniform(0.05, 0.3))


async def kill_at_times(cluster: Cluster, draws: random.Random, end: float, outcomes: Counter[str]) -> None:
    """SIGKILL one worker after the other, with time between for it to come back."""
    while time.monotonic() + 12 < end:
        await asyncio.sleep(draws.uniform(4, 10))
        victims = [*cluster.pids("prefill_svc"), *cluster.pids("decode_svc")]
        if victims:
            os.kill(draws.choice(victims), signal.SIGKILL)
            outcomes["kills"] += 1


async def soak(cluster: Cluster, seed: int, seconds: float) -> Counter[str]:
    """Run the load; raises AssertionError where something is wrong or left over."""
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds
    async with connected(cluster) as stub:
        clients = [client(stub, seed * 1000 + number, end, outcomes) for number in range(NUM_CLIENTS)]
        await asyncio.gather(kill_at_times(cluster, random.Random(seed), end, outcomes), *clients)
        await wait_idle(stub, timeout_s=30)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "tiny")
        with running("--prefill", "2", "--decode", "2", "--model", str(model), settings=SETTINGS) as cluster:
            print(f"soak: seed {options.seed}, {options.seconds:g} s", flush=True)
            try:
                outcomes = asyncio.run(soak(cluster, options.seed, options.seconds))
            except AssertionError as error:
                print(f"soak: FAILED: {error}\n{cluster.output[-20000:]}")
                return 1
    print("soak: all pages free or cached at the end; " + ", ".join(f"{how} {n}" for how, n in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
