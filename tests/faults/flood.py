"""Garbage at every port of a deployment, while valid clients are served: nothing crashes, grows, or slows down much.

    python tests/faults/flood.py --connections 10000 --rate 100            (make flood)

One router, one prefill and one decode worker with a tiny model. Strangers connect to their gRPC ports and to the HTTP
port, and send random bytes, broken HTTP/2, calls with wrong fields, huge metadata, half of a call and then nothing.
They come in two bursts, and valid clients' latency in them is held against that of the quiet time before each. The
strangers are a process of their own, at a lower priority, since they are not on the servers' cores in the field.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}  # before grpc is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import uvloop
from chaos.processes import Level, Sample, sample
from cluster import Stub, busy, generate, greedy
from garbage import Door, Flood
from services import Deployment

from pageferry.v1 import inference_pb2 as pb

ROUNDS = 2
CLIENTS_PER_S = 8.0
PROMPT, NUM_TOKENS = list(range(4, 68)), 24
MAX_SLOWER = 2.0  # p99 of valid clients, against undisturbed
WARM_UP = 300  # connections before anything is measured
# Of each process, in the last burst. Before, memory grows to what the largest metadata at once take, and is kept.
MAX_GROWTH_BYTES, MAX_GROWTH = 8e6, 0.05
MIN_BURST = 2000  # connections, below which growth says nothing
SETTINGS = {"telemetry.max_traces": "32"}
REST_S = 60.0
# What a call is never answered: UNKNOWN, INTERNAL, DATA_LOSS, and HTTP's 500. What breaks the protocol itself is for
# gRPC's library to answer, which does so with INTERNAL.
WRONG = re.compile(r"(?!broken_frames).*status (2|13|15|500)$|.*not connected|.*crashed")


@dataclass
class Result:
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "flooded": []})
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def p99(self, phase: str) -> float:
        ordered = sorted(self.latencies_s[phase])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]


class Valid:
    """Clients that behave; each must get the same answer."""

    def __init__(self, stub: Stub, result: Result) -> None:
        self._stub = stub
        self._result = result
        self._golden: list[int] = []

    async def run(self, latencies_s: list[float], over: asyncio.Event) -> None:
        """Ask at a steady rate on average until told to stop; back when all are answered."""
        draws = random.Random(0)
        async with asyncio.TaskGroup() as tasks:
            while not over.is_set():
                tasks.create_task(self._ask(latencies_s))
                await asyncio.sleep(draws.uniform(0.5, 1.5) / CLIENTS_PER_S)

    async def _ask(self, latencies_s: list[float]) -> None:
        began = time.monotonic()
        try:
            answer = await generate(self._stub, greedy(PROMPT, NUM_TOKENS), timeout_s=60)
        except Exception as error:  # whatever it is, it failed
            self._result.problems.append(f"a valid client got {type(error).__name__}: {str(error)[:500]}")
            return
        latencies_s.append(time.monotonic() - began)
        self._golden = self._golden or answer.token_ids
        if answer.token_ids != self._golden:
            self._result.problems.append(f"a valid client got {answer.token_ids} instead of {self._golden}")


async def strangers(doors: list[Door], number: int, per_second: float, seed: int) -> Counter[str]:
    """A process of its own makes the connections."""
    task = json.dumps([[[door.kind, door.address] for door in doors], number, per_second, seed])
    process = await asyncio.create_subprocess_exec(
        "nice", "-n", "10", sys.executable, __file__, "--strangers", task, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return Counter(json.loads(output)) if process.returncode == 0 else Counter({"the strangers crashed": 1})


def be_strangers(task: str) -> int:
    doors, number, per_second, seed = json.loads(task)
    flood = Flood([Door(*door) for door in doors], seed)
    uvloop.run(flood.run(number, per_second))
    print(json.dumps(flood.outcomes))
    return 0


async def flood(deployment: Deployment, number: int, per_second: float, seed: int) -> Result:
    """Quiet, flooded, quiet, flooded; then what is left."""
    result = Result()
    doors = [Door(service.role, service.address) for service in deployment.services]
    doors.append(Door("http", deployment.routers[0].http.removeprefix("http://")))
    async with deployment.stub() as stub:
        clients = Valid(stub, result)
        await phase(clients, [], strangers(doors, WARM_UP, per_second, seed))
        await rest(deployment, stub, None, result)
        level = Level.of(deployment.services)
        for turn in range(ROUNDS):
            before = {service.name: sample(service) for service in deployment.services}
            burst_s = number / ROUNDS / per_second
            await phase(clients, result.latencies_s["quiet"], asyncio.sleep(burst_s, Counter()))
            seeded = strangers(doors, number // ROUNDS, per_second, seed + 1 + turn)
            result.outcomes += await phase(clients, result.latencies_s["flooded"], seeded)
        await rest(deployment, stub, level, result)
    judge(deployment, before if number / ROUNDS >= MIN_BURST else {}, result)
    return result


async def phase(clients: Valid, latencies_s: list[float], what) -> Counter[str]:  # type: ignore[no-untyped-def]
    over = asyncio.Event()
    asking = asyncio.create_task(clients.run(latencies_s, over))
    outcomes: Counter[str] = await what
    over.set()
    await asking
    return outcomes


async def rest(deployment: Deployment, stub: Stub, level: Level | None, result: Result) -> None:
    """Wait until nothing is in use any more."""
    end = time.monotonic() + REST_S
    while True:
        left = busy(await stub.GetStatus(pb.GetStatusRequest()))
        left += level.above(deployment.services, files=2, threads=4) if level is not None else []
        if not left:
            return
        if time.monotonic() > end:
            result.problems += left
            return
        await asyncio.sleep(0.2)


def judge(deployment: Deployment, before: dict[str, Sample], result: Result) -> None:
    """Of how strangers were answered, how processes are, and by how much they grew since `before`."""
    for service in deployment.services:
        if not service.is_alive:
            result.problems.append(f"{service.name} has ended")
            continue
        now = sample(service)
        was = before.get(service.name, now)
        print(f"flood: {service.name}: {was if was is not now else 'not watched'}, then {now}")
        if now.own - was.own > max(MAX_GROWTH_BYTES, MAX_GROWTH * was.own):
            result.problems.append(f"{service.name} grew by {(now.own - was.own) / 1e6:.1f} MB")
        errors = [line for line in service.output.splitlines() if '"level": "error"' in line or "Traceback" in line]
        result.problems += [f"{service.name} logged {line[:1500]}" for line in errors[:5]]
    for outcome, number in sorted(result.outcomes.items()):
        print(f"flood: {number:6d} {outcome}")
        if WRONG.match(outcome):
            result.problems.append(f"{number} times {outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=100.0, help="connections a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--any-latency", action="store_true", help="don't judge it: for machines with other work")
    parser.add_argument("--strangers", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strangers:
        return be_strangers(options.strangers)
    with Deployment(1, 1, 1, SETTINGS) as deployment:
        result = uvloop.run(flood(deployment, options.connections, options.rate, options.seed))
    for phase_name, latencies in result.latencies_s.items():
        median, p99 = statistics.median(latencies), result.p99(phase_name)
        print(
            f"flood: {phase_name}: {len(latencies)} valid requests, p50 {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms"
        )
    slower = result.p99("flooded") / result.p99("quiet")
    print(f"flood: p99 {slower:.2f} times that of quiet time (limit {MAX_SLOWER:g})")
    if slower > MAX_SLOWER and not options.any_latency:
        result.problems.append("valid clients were slowed down too much")
    for problem in result.problems:
        print(f"flood: WRONG: {problem}")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
