"""How much of a long prompt's transfer is hidden behind its prefill.

    python bench/handoff.py [--model smollm2] [--tokens 1500] [--rounds 7] [--set scheduler.final_chunk_tokens=0 ...]

Starts one prefill and one decode worker and sends one prompt at a time, each another one. Hidden is 1 - tail / in
flight: the time from the end of compute until the decode worker has all pages, against that with a page in flight.
"""

import argparse
import asyncio
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from cluster import Cluster, Stub, connected, generate, greedy, running
from traces import SPLIT_SPANS, one, wait_trace

LIMIT = 0.7


async def one_round(stub: Stub, number: int, num_tokens: int) -> float:
    ids = random.Random(number).choices(range(1000, 40000), k=num_tokens)
    answer = await generate(stub, greedy(ids, 4), timeout_s=300)
    assert answer.started is not None
    spans = await wait_trace(stub, answer.started.trace_id, SPLIT_SPANS)
    figures = {
        name: one(spans, "kv.push", "CLIENT").attributes[f"pageferry.handoff.{name}"]
        for name in ("pages", "bytes", "in_flight_ms", "tail_ms", "hidden")
    }
    print(
        "round {number}: {pages} pages, {bytes} bytes, {in_flight_ms:.1f} ms in flight, {tail_ms:.1f} ms tail, "
        "{hidden:.1%} hidden".format(number=number, **figures),
        flush=True,
    )
    return float(figures["hidden"])


async def measure(cluster: Cluster, num_rounds: int, num_tokens: int) -> list[float]:
    async with connected(cluster) as stub:
        return [await one_round(stub, number + 1, num_tokens) for number in range(num_rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    options = parser.parse_args()
    settings = {"router.local_prefill_tokens": "0"} | dict(item.split("=", 1) for item in options.set)
    print(f"handoff: starting 1 prefill and 1 decode worker with {options.model}", flush=True)
    arguments = ("--prefill", "1", "--decode", "1", "--model", options.model)
    with running(*arguments, settings=settings, ready_s=300) as cluster:
        shares = asyncio.run(measure(cluster, options.rounds, options.tokens))
    hidden = statistics.median(shares)
    print(f"hidden behind prefill: {hidden:.1%} (median of {len(shares)}; at least {LIMIT:.0%} is wanted)")
    return 0 if hidden >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
