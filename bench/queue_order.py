"""What the order of the router's queue does to first tokens: the router's own queue and policy over a modelled worker.

    python bench/queue_order.py [--rate 4] [--requests 4000] [--seed 1]

Time is simulated, so that the figures are the same everywhere: one prefill worker of 1,200 tokens a second, which takes
the least that is left first, with ageing, in chunks of 256; nine of ten prompts have 128 tokens, one has 1,500. Prints
the time to the end of the prompt's compute by the order of the queue: as they came, or shortest first with ageing.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout
from pageferry.router.candidates import Demand, PrefillState
from pageferry.router.queue import Queued, RequestQueue

TOKENS_PER_S = 1200.0
CHUNK = 256
AGEING = 250.0  # of the worker
SHORT, LONG = 128, 1500
LAYOUT = CacheLayout(
    "0" * 32, PageFormat.parse("int8"), page_size=16, num_kv_heads=1, head_dim=16, groups=(full_group(1),)
)


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Queued):
    """A prompt on its way."""

    came: float
    num_tokens: int
    num_left: int = 0
    sent: float = 0.0


class Worker:
    """Computes chunk by chunk, the least left first, less what it has gained by waiting."""

    def __init__(self) -> None:
        self.prompts: list[Request] = []

    def takes(self, request: Request) -> bool:
        """Whether the router sends it one more, by what the worker last told."""
        busy = len(self.prompts)
        state = PrefillState(
            "worker",
            LAYOUT,
            num_waiting=max(0, busy - 1),
            queued_tokens=sum(prompt.num_left for prompt in self.prompts),
            tokens_per_s=TOKENS_PER_S,
            chunk_tokens=CHUNK,
            cached_tokens=0,
            num_running=min(1, busy),
        )
        return state.has_little_queued(Demand(request.num_tokens, 32))

    def step(self) -> tuple[float, list[Request]]:
        """Seconds, and the prompts that are done after them."""
        self.prompts.sort(key=lambda prompt: prompt.num_left + AGEING * prompt.sent)
        budget = CHUNK
        for prompt in self.prompts:
            num_tokens = min(budget, prompt.num_left)
            prompt.num_left -= num_tokens
            budget -= num_tokens
        done = [prompt for prompt in self.prompts if not prompt.num_left]
        self.prompts = [prompt for prompt in self.prompts if prompt.num_left]
        return (CHUNK - budget) / TOKENS_PER_S, done


def arrivals(rate: float, number: int, seed: int) -> Iterator[Request]:
    draw = random.Random(seed)
    now = 0.0
    for _ in range(number):
        now += draw.expovariate(rate)
        yield Request(came=now, num_tokens=LONG if draw.random() < 0.1 else SHORT)


def run(requests: Sequence[Request], ageing: float | None) -> dict[int, list[float]]:
    """Seconds from arrival to the end of compute, by the prompt's length; no ageing: as they came."""
    queue: RequestQueue[Request] = RequestQueue(10**9)
    worker, now, took = Worker(), 0.0, {SHORT: [], LONG: []}  # type: ignore[var-annotated]
    coming = [(request.came, index, request) for index, request in enumerate(requests)]
    heapq.heapify(coming)
    while coming or len(queue) or worker.prompts:
        if not len(queue) and not worker.prompts:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            request = heapq.heappop(coming)[2]
            request.num_left = request.num_tokens
            request.rank = 0.0 if ageing is None else request.num_tokens + ageing * request.came
            queue.add(request)
        for first in queue.waiting():
            if not worker.takes(first):
                break
            queue.take(first, now)
            first.sent = now
            worker.prompts.append(first)
        seconds, done = worker.step()
        now += seconds
        for request in done:
            took[request.num_tokens].append(now - request.came)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print("| order | short prompts, median | p90 | long prompts, median | p90 | longest wait |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, ageing in (("as they came", None), ("ageing 1000", 1000.0), ("ageing 250", 250.0), ("ageing 0", 0.0)):
        took = run([*arrivals(arguments.rate, arguments.requests, arguments.seed)], ageing)
        cells = [f"{1000 * value:.0f} ms" for kind in (SHORT, LONG) for value in quantiles(took[kind])]
        print(f"| {name} | {' | '.join(cells)} | {max(took[LONG]):.1f} s |")


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return statistics.median(seconds), tenths[8]


if __name__ == "__main__":
    main()
