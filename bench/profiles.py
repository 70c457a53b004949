"""What a flood of `throughput` work costs `interactive` requests, and these the flood.

    python bench/profiles.py [--rounds 2] [--requests 60] [--streams 48] [--set SECTION.FIELD=VALUE]

Starts `pageferry up` with one prefill and one decode worker and takes turns, as often as `--rounds` says: interactive
requests alone, one every 0.5 to 1 s, of 128 tokens and 16 more; then a flood alone, that many streams at once, more
than there are slots, each of 256 tokens and 128 more, begun anew when it ends; then both. Tokens are random, so that no
prompt is cached. A chunk's time is that of the prefill worker's full chunks in the flood alone. Prints a table, and
whether the first token's p99 beside the flood is within twice that of an idle system and a chunk's time, and the flood
keeps 70 % of its tokens a second. Run it where nothing else runs.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
from cluster import Cluster, Stub, connected, greedy, running

from pageferry.core.settings import parse_overrides
from pageferry.v1 import inference_pb2 as pb

INTERACTIVE, FLOOD = (128, 16), (256, 128)  # tokens of the prompt, and of the answer
GAP_S = (0.5, 1.0)
CHUNK_TOKENS = 256  # scheduler.chunk_tokens
SETTLE_S = 8.0  # until all slots are taken, and the first streams end
WARM_UP = 6
WITHIN, AT_LEAST = 2.0, 0.7
PARTS = ("queue", "reserve", "prefill_queue", "prefill")


@dataclass
class Seen:
    """Of one kind of phase, over all rounds."""

    ttft_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    tokens_per_s: list[float] = field(default_factory=list)
    chunk_ms: list[float] = field(default_factory=list)


class Load:
    """Interactive requests, and a flood that runs until it is stopped."""

    def __init__(self, stub: Stub, seed: int) -> None:
        self._stub = stub
        self._draw = random.Random(seed)
        self._num_tokens = 0
        self._streams: list[asyncio.Task[None]] = []

    def _request(self, lengths: tuple[int, int], profile: str) -> pb.GenerateRequest:
        request = greedy([self._draw.randrange(1000, 40_000) for _ in range(lengths[0])], lengths[1])
        request.profile = profile
        return request

    async def interactive(self, number: int, seen: Seen) -> None:
        """In open loop: a slow answer delays nobody but itself."""
        answers = []
        for _ in range(number):
            answers.append(asyncio.create_task(self._ask(seen)))
            await asyncio.sleep(self._draw.uniform(*GAP_S))
        await asyncio.gather(*answers)

    async def _ask(self, seen: Seen) -> None:
        began, first = time.monotonic(), None
        async for event in self._stub.Generate(self._request(INTERACTIVE, "interactive"), timeout=120):
            if first is None and event.delta.tokens:
                first = time.monotonic() - began
                seen.ttft_ms.append(1000 * first)
            for part in PARTS if event.HasField("finished") else ():
                seen.parts_ms[part].append(getattr(event.finished.timings, f"{part}_ms"))

    async def start_flood(self, num_streams: int) -> None:
        self._streams = [asyncio.create_task(self._stream()) for _ in range(num_streams)]
        await asyncio.sleep(SETTLE_S)

    async def stop_flood(self) -> None:
        for stream in self._streams:
            stream.cancel()
        for outcome in await asyncio.gather(*self._streams, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError("a stream of the flood has failed") from outcome
        await asyncio.sleep(1.0)

    async def _stream(self) -> None:
        while True:
            async for event in self._stub.Generate(self._request(FLOOD, "throughput"), timeout=600):
                self._num_tokens += len(event.delta.tokens)

    async def measure_flood(self, meanwhile: "asyncio.Future[None] | asyncio.Task[None]", seen: Seen) -> None:
        """Tokens a second until `meanwhile` is over."""
        began, before = time.monotonic(), self._num_tokens
        await meanwhile
        seen.tokens_per_s.append((self._num_tokens - before) / (time.monotonic() - began))
        status = await self._stub.GetStatus(pb.GetStatusRequest())
        rates = [worker.load.prefill_tokens_per_s for worker in status.workers if worker.role == "prefill"]
        seen.chunk_ms.append(1000 * CHUNK_TOKENS / max(rates))


async def measure(stub: Stub, options: argparse.Namespace) -> tuple[Seen, Seen, Seen]:
    idle, flood, both = Seen(), Seen(), Seen()
    load = Load(stub, options.seed)
    await load.interactive(WARM_UP, Seen())
    for number in range(1, options.rounds + 1):
        await load.interactive(options.requests, idle)
        await load.start_flood(options.streams)
        await load.measure_flood(asyncio.ensure_future(asyncio.sleep(options.requests * sum(GAP_S) / 4)), flood)
        await load.measure_flood(asyncio.create_task(load.interactive(options.requests, both)), both)
        await load.stop_flood()
        rates = f"{flood.tokens_per_s[-1]:.0f} tokens/s alone, {both.tokens_per_s[-1]:.0f} with company"
        ends = [percentile(seen.ttft_ms[-options.requests :], 99) for seen in (idle, both)]
        print(f"round {number}: first token p99 {ends[0]:.0f}, {ends[1]:.0f} ms; {rates}", file=sys.stderr, flush=True)
    return idle, flood, both


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share))


def table(idle: Seen, flood: Seen, both: Seen) -> str:
    rows = ["| | first token, p50 | p90 | p99 | flood |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, seen in (("interactive alone", idle), ("flood alone", flood), ("both", both)):
        cells = [f"{percentile(seen.ttft_ms, share):.0f} ms" if seen.ttft_ms else "" for share in (50, 90, 99)]
        cells.append(f"{np.mean(seen.tokens_per_s):.0f} tokens/s" if seen.tokens_per_s else "")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += ["", "| part, p50 / p99 in ms | " + " | ".join(PARTS) + " |", "| --- |" + " ---: |" * len(PARTS)]
    for name, seen in (("interactive alone", idle), ("both", both)):
        cells = [f"{percentile(each, 50):.0f} / {percentile(each, 99):.0f}" for each in seen.parts_ms.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def verdict(idle: Seen, flood: Seen, both: Seen) -> bool:
    chunk_ms = float(np.median(flood.chunk_ms))
    bound = WITHIN * percentile(idle.ttft_ms, 99) + chunk_ms
    first = percentile(both.ttft_ms, 99)
    share = float(np.mean(both.tokens_per_s) / np.mean(flood.tokens_per_s))
    print(f"\na chunk of {CHUNK_TOKENS} tokens takes {chunk_ms:.0f} ms")
    print(f"first token p99 beside the flood: {first:.0f} ms, bound {bound:.0f} ms")
    print(f"the flood keeps {share:.0%}, bound {AT_LEAST:.0%}")
    return first <= bound and share >= AT_LEAST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=60, help="interactive ones, of a phase")
    parser.add_argument("--streams", type=int, default=48, help="of the flood")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    options = parser.parse_args()

    async def run(cluster: Cluster) -> tuple[Seen, Seen, Seen]:
        async with connected(cluster) as stub:
            return await measure(stub, options)

    settings = {name: str(value) for name, value in parse_overrides(options.set).items()}
    workers = ("--prefill", "1", "--decode", "1")
    with running(*workers, "--model", options.model, settings=settings, ready_s=300) as cluster:
        seen = asyncio.run(run(cluster))
    print(table(*seen))
    return 0 if verdict(*seen) else 1


if __name__ == "__main__":
    sys.exit(main())
