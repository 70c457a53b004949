"""What a token costs beside the model: the share of its time outside the forward pass.

    python bench/overhead.py [--model smollm2] [--tokens 128] [--rounds 5] [--json FILE]

Starts one prefill and one decode worker, streams one request at a time, and compares the time between tokens as the
client sees it with the forward pass's own time as the decode worker reports it on the span `decode.generate`. What lies
between is sampling, scheduling, the event loops, the router and gRPC.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from answer import Answer
from cluster import Cluster, Stub, connected, greedy, running
from traces import SPLIT_SPANS, one, wait_trace

PROMPT = "The ferry left the harbour at dawn, and its crew counted the crates on deck before the fog came in. "
LIMIT = 0.15


@dataclass(frozen=True)
class Round:
    """One stream; milliseconds per token, of the tokens that the decode worker drew."""

    token_ms: float
    forward_ms: float

    @property
    def outside(self) -> float:
        return 1 - self.forward_ms / self.token_ms


async def one_round(stub: Stub, number: int, num_tokens: int) -> Round:
    answer, arrivals = Answer(), []
    # Every round has another beginning, so that no prompt is cached and all are handed over.
    async for response in stub.Generate(greedy(f"{number}. {PROMPT * 4}", num_tokens), timeout=300):
        answer.take(response)
        arrivals += [time.perf_counter()] * len(response.delta.tokens)
    assert answer.started is not None
    spans = await wait_trace(stub, answer.started.trace_id, SPLIT_SPANS)
    attributes = one(spans, "decode.generate").attributes
    forward_ms = attributes["pageferry.forward_ms"] / attributes["pageferry.steps"]
    # From the second token on: the first one's gap holds the hand-off, which is no cost of a token.
    token_ms = (arrivals[-1] - arrivals[1]) / (len(arrivals) - 2) * 1e3
    return Round(token_ms, forward_ms)


async def measure(cluster: Cluster, num_rounds: int, num_tokens: int) -> list[Round]:
    async with connected(cluster) as stub:
        await one_round(stub, 0, 16)  # warm
        return [await one_round(stub, number + 1, num_tokens) for number in range(num_rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rounds to this file")
    options = parser.parse_args()
    arguments = ("--prefill", "1", "--decode", "1", "--model", options.model)
    settings = {"router.local_prefill_tokens": "0"}
    print(f"overhead: starting 1 prefill and 1 decode worker with {options.model}", flush=True)
    with running(*arguments, settings=settings, ready_s=300) as cluster:
        rounds = asyncio.run(measure(cluster, options.rounds, options.tokens))
    for number, one_of_them in enumerate(rounds, 1):
        print(f"round {number}: {one_of_them.token_ms:.2f} ms a token, {one_of_them.forward_ms:.2f} ms of it forward")
    outside = statistics.median(one_of_them.outside for one_of_them in rounds)
    print(f"share outside the forward pass: {outside:.1%} (median of {len(rounds)}; limit {LIMIT:.0%})")
    if options.json:
        document = {"rounds": [asdict(one_of_them) for one_of_them in rounds], "outside": outside}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if outside < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
