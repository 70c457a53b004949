"""What a collector that is away, or slow, costs requests, whose latency is shown beside that without a collector, and
ends of processes.

    python bench/collector_away.py [--turns 40] [--requests 24] [--json FILE]

For each kind of collector two deployments, one with it and one without any, are asked in turns: a few requests to one,
as many to the other, over and over, so that whatever else the machine does meets both alike. The workers are
Pageferry's but for the model, which is a clock. What two without a collector differ by, "none", is noise. `exit s` is
from SIGTERM to the end of a process, its drain included, of the slowest.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[1] / "tests" / "support"), str(Path(__file__).parent)])

import grpc
from collectors import AWAY, working

from pageferry.v1 import inference_pb2 as pb
from router import GENERATE, Cluster, Load, check_grpc, connected, prompt, running

LOAD = Load("requests", streams=4, rate=500, tokens=8, prefill=True)
SLOW_S = 5.0
COLLECTORS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "none": lambda: nullcontext(""),
    **AWAY,
    f"answers after {SLOW_S:g} s": lambda: working(SLOW_S),
    "works": working,
}


@dataclass
class Side:
    """One deployment, and what its requests took, in milliseconds: to the first token, and to the last."""

    cluster: Cluster
    channel: grpc.aio.Channel
    first_ms: list[float] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)

    async def ask(self, number: int) -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(number, LOAD.prompt_tokens)))
        request.stop.max_tokens, request.stop.ignore_eos = LOAD.tokens, True
        began = time.perf_counter()
        call = self.channel.unary_stream(GENERATE)(request.SerializeToString())
        messages, times = [], []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
            times.append((time.perf_counter() - began) * 1000)
        check_grpc(messages, LOAD.tokens)
        self.first_ms.append(times[1])  # after Started
        self.last_ms.append(times[-1])

    async def turn(self, first: int, num_requests: int) -> None:
        async def stream(begin: int) -> None:
            for number in range(begin, num_requests, LOAD.streams):
                await self.ask(first + number)

        await asyncio.gather(*(stream(begin) for begin in range(LOAD.streams)))

    def spans_lost(self) -> int:
        """The router's, so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.cluster.http_port}/metrics", timeout=10) as answer:
            found = re.search(rb"^pageferry_spans_lost_total (\S+)", answer.read(), re.MULTILINE)
        return int(float(found[1])) if found else 0


async def measure(clusters: list[Cluster], turns: int, num_requests: int) -> list[Side]:
    async with contextlib.AsyncExitStack() as stack:
        sides = [Side(cluster, await stack.enter_async_context(connected(cluster))) for cluster in clusters]
        for turn in range(-2, turns):
            for side in sides if turn % 2 else sides[::-1]:
                await side.turn((turn + 2) * num_requests % 40_000, num_requests)
            if turn < 0:  # to get warm
                for side in sides:
                    side.first_ms, side.last_ms = [], []
    return sides


def end(cluster: Cluster) -> float:
    """Seconds that its processes take, one after the other, the slowest of them."""
    longest = 0.0
    for process in (cluster.router, *cluster.workers):
        began = time.monotonic()
        process.terminate()
        process.wait(60)
        longest = max(longest, time.monotonic() - began)
    return longest


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * len(values)))]


def figures(side: Side) -> dict[str, float]:
    return {
        "requests": len(side.last_ms),
        **{
            f"{what}_{name}_ms": value
            for what, values in (("first_token", side.first_ms), ("request", side.last_ms))
            for name, value in (("p50", statistics.median(values)), ("p99", percentile(values, 0.99)))
        },
        "router_spans_lost": side.spans_lost(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--requests", type=int, default=24, help="of a turn")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", action="append", default=[], choices=COLLECTORS, metavar="COLLECTOR")
    options = parser.parse_args()
    results = {}
    heads = ("first token p50", "p99", "request p50", "p99 ms", "lost spans", "exit s")
    print(f"{'collector':29}" + "".join(map("{:>{}}".format, heads, (16, 8, 13, 9, 12, 8))))
    for name in options.only or COLLECTORS:
        with COLLECTORS[name]() as url, contextlib.ExitStack() as stack:
            clusters = []
            for endpoint in ("", url):
                os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
                clusters.append(stack.enter_context(running(LOAD)))
            sides = asyncio.run(measure(clusters, options.turns, options.requests))
            results[name] = {
                which: figures(side) | {"exit_s": end(side.cluster)}
                for which, side in zip(("without", "with"), sides, strict=True)
            }
        for which, row in results[name].items():
            first50, first99, last50, last99, lost, exit_s = list(row.values())[1:]
            times = f"{first50:16.2f}{first99:8.2f}{last50:13.2f}{last99:9.2f}"
            print(f"{name:20}{which:9}{times}{lost:12.0f}{exit_s:8.1f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
