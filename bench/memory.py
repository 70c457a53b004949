"""Whether processes keep their size under load.

    python bench/memory.py [--minutes 10] [--warm-up 2] [--clients 4] [--seed 1] [--json FILE]

Starts `pageferry up` with one prefill and one decode worker and loads it without a pause: short and long prompts, half
of them with a shared beginning, greedy and drawn, with and without logprobs, over gRPC and HTTP, streamed and whole, a
quarter cancelled. After the warm-up, in which buffers grow to the largest batch and the router's store of traces fills
(it takes 300 requests at least), the resident size of each process is read every few seconds; the median of the last
minute may be at most 2 % off that of the first. Beside it: memory of its own (unique), files and threads, so that what
grows can be told.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import grpc
import httpx
import psutil
from cluster import Cluster, Stub, connected, generate, running, wait_idle

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

LIMIT = 0.02
SAMPLE_S = 3.0
SPAN_S = 60.0  # at the beginning and at the end, over which medians are taken
PROMPT_TOKENS = (3, 16, 17, 60, 250, 700, 1500)
PREFIX = list(range(2000, 2160))
WARM_REQUESTS = 300  # by which the router's store of traces is full
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    role: str
    at_s: float
    resident: int  # bytes
    unique: int
    files: int
    threads: int


def draw_ids(draws: random.Random) -> list[int]:
    tail = draws.choices(range(1000, 40000), k=draws.choice(PROMPT_TOKENS))
    return PREFIX + tail if draws.random() < 0.5 else tail


async def over_grpc(stub: Stub, draws: random.Random) -> str:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=draw_ids(draws)),
        sampling=SamplingParams(
            temperature=draws.choice((0.0, 1.0)), seed=draws.randrange(1000), logprobs=draws.choice((None, 0, 5))
        ),
        stop=StopConditions(max_tokens=draws.choice((1, 8, 64)), ignore_eos=True),
    )
    if draws.random() < 0.75:
        await generate(stub, request, timeout_s=TIMEOUT_S)
        return "gRPC"
    call = stub.Generate(request, timeout=TIMEOUT_S)
    for _ in range(draws.randrange(6)):
        if await call.read() is grpc.aio.EOF:
            break
    call.cancel()
    return "cancelled"


async def over_http(http: httpx.AsyncClient, draws: random.Random) -> str:
    stream = draws.random() < 0.5
    words = " ".join(str(draws.randrange(10**6)) for _ in range(draws.choice((1, 10, 100))))
    chat = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": draws.choice((1, 8, 64)),
        "temperature": draws.choice((0, 1)),
        "logprobs": draws.random() < 0.5,
        "stream": stream,
    }
    async with http.stream("POST", "/v1/chat/completions", json=chat) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            if stream and draws.random() < 0.01:
                return "disconnected"
    return "HTTP"


class Load:
    """Sends requests until `over` is set."""

    def __init__(self, stub: Stub, http: httpx.AsyncClient) -> None:
        self.stub = stub
        self.http = http
        self.outcomes: Counter[str] = Counter()
        self.warm = asyncio.Event()  # enough requests have come
        self.over = asyncio.Event()

    async def client(self, seed: int) -> None:
        draws = random.Random(seed)
        while not self.over.is_set():
            one_request = over_grpc(self.stub, draws) if draws.random() < 0.6 else over_http(self.http, draws)
            self.outcomes[await one_request] += 1
            if self.outcomes.total() >= WARM_REQUESTS:
                self.warm.set()


async def sample(cluster: Cluster, seconds: float) -> list[Sample]:
    roles = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}
    processes = {"up": psutil.Process(cluster.process.pid)}
    processes |= {role: psutil.Process(cluster.pids(module)[0]) for role, module in roles.items()}
    samples, start = [], time.monotonic()
    while (at_s := time.monotonic() - start) < seconds:
        for role, process in processes.items():
            memory = process.memory_full_info()
            samples.append(Sample(role, at_s, memory.rss, memory.uss, process.num_fds(), process.num_threads()))
        await asyncio.sleep(SAMPLE_S)
    return samples


async def measure(cluster: Cluster, options: argparse.Namespace) -> list[Sample]:
    async with connected(cluster) as stub, httpx.AsyncClient(base_url=cluster.http, timeout=TIMEOUT_S) as http:
        load = Load(stub, http)
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.clients):
                tasks.create_task(load.client(1000 * options.seed + number))
            await asyncio.sleep(60 * options.warm_up)
            await load.warm.wait()
            print(f"warm after {load.outcomes.total()} requests", flush=True)
            samples = await sample(cluster, 60 * options.minutes)
            load.over.set()
        await wait_idle(stub, timeout_s=30)
    print("requests: " + ", ".join(f"{count} {how}" for how, count in load.outcomes.most_common()))
    return samples


def report(samples: list[Sample]) -> float:
    """Print each process's change; the largest share, in size or shrinkage."""
    span = min(SPAN_S, samples[-1].at_s / 3)
    worst = 0.0
    for role in dict.fromkeys(sample.role for sample in samples):
        own = [sample for sample in samples if sample.role == role]
        ends = [s for s in own if s.at_s < span], [s for s in own if s.at_s > own[-1].at_s - span]
        resident, unique, files, threads = (
            [statistics.median(getattr(sample, name) for sample in end) for end in ends]
            for name in ("resident", "unique", "files", "threads")
        )
        drift = resident[1] / resident[0] - 1
        worst = max(worst, abs(drift))
        print(
            f"{role:<8} resident {resident[0] / 1e6:7.2f} to {resident[1] / 1e6:7.2f} MB, {drift:+.2%}; unique "
            f"{unique[0] / 1e6:7.2f} to {unique[1] / 1e6:7.2f} MB; files {files[0]:g} to {files[1]:g}, threads "
            f"{threads[0]:g} to {threads[1]:g}"
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=2, metavar="MINUTES")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    print(f"memory: {options.clients} clients, {options.warm_up:g} minutes of warm-up, {options.minutes:g} measured")
    with running("--prefill", "1", "--decode", "1", ready_s=300) as cluster:
        samples = asyncio.run(measure(cluster, options))
    worst = report(samples)
    print(f"largest change of a resident size: {worst:.2%} (limit {LIMIT:.0%})")
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples]) + "\n", encoding="utf-8")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
