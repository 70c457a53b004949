"""A flood of `throughput` work beside `interactive` requests, in simulated time: workers take as long for each token
wherever this runs."""

import asyncio
import statistics
from dataclasses import dataclass, field

import pytest
from sim.nodes import Settings
from sim.world import OK, Request, World, simulate

from pageferry.core.config import SchedulerConfig

CHUNK, SLOTS = 32, 4
CHUNK_S = 1.2 * (0.002 + 0.001 * CHUNK)  # the longest that `TimedRunner` takes for one
SETTINGS = Settings(
    num_pages=256,
    scheduler=SchedulerConfig(
        chunk_tokens=CHUNK, final_chunk_tokens=0, local_chunk_tokens=16, max_num_seqs=SLOTS, prefix_cache=False
    ),
)
GAP_S, NUM_REQUESTS = 0.2, 20
STREAMS = 3 * SLOTS


@dataclass
class Seen:
    ttft_ms: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0

    @property
    def worst_ms(self) -> float:
        return max(self.ttft_ms)


class Flood:
    """Streams that begin anew when they end, more than there are slots."""

    def __init__(self, world: World, profile: str) -> None:
        self._world = world
        self._profile = profile
        self._is_over = False
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(STREAMS)]
        self._requests: list[Request] = []

    async def _stream(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            prompt = [1 + (number * 7 + turn * 3 + index) % 50 for index in range(2 * CHUNK)]
            request = self._world.ask(Request(f"f{number}.{turn}", prompt, 24, profile=self._profile))
            self._requests.append(request)
            turn += 1
            assert request.task is not None
            await request.task

    @property
    def num_tokens(self) -> int:
        return sum(len(request.answer.token_ids) for request in self._requests)

    def check(self) -> None:
        """None has failed."""
        assert {request.outcome for request in self._requests} <= {OK, ""}
        for task in self._tasks:
            assert not task.done()

    async def stop(self) -> None:
        self._is_over = True
        for request in self._requests:
            if not request.outcome and request.task is not None:
                request.task.cancel()
        await asyncio.gather(*self._tasks)


async def interactive(world: World, name: str) -> list[float]:
    """Times to the first token in ms, of requests in open loop."""
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = [1 + (number + index) % 50 for index in range(CHUNK // 2)]
        requests.append(world.ask(Request(f"{name}{number}", prompt, 4)))
        await asyncio.sleep(GAP_S * (0.5 + world.rng.random()))
    await asyncio.gather(*(request.task for request in requests if request.task))
    for request in requests:
        request.check(SETTINGS, {OK})
    return [request.answer.finished.timings.ttft_ms for request in requests if request.answer.finished]


async def measured(world: World, flood_profile: str) -> tuple[Seen, Seen, Seen]:
    """Interactive requests alone, the flood alone, then both."""
    idle = Seen(await interactive(world, "idle"))
    flood = Flood(world, flood_profile)
    await asyncio.sleep(1.0)

    async def rate(seconds: float) -> float:
        before, began = flood.num_tokens, world.loop.time()
        await asyncio.sleep(seconds)
        return (flood.num_tokens - before) / (world.loop.time() - began)

    alone = Seen([], await rate(NUM_REQUESTS * GAP_S))
    during = asyncio.create_task(rate(NUM_REQUESTS * GAP_S))
    both = Seen(await interactive(world, "both"))
    both.tokens_per_s = await during
    flood.check()
    await flood.stop()
    await world.until_idle(10)
    return idle, alone, both


def run(seed: int, flood_profile: str) -> tuple[Seen, Seen, Seen]:
    seen: list[tuple[Seen, Seen, Seen]] = []

    async def scenario(world: World) -> None:
        seen.append(await measured(world, flood_profile))

    simulate(scenario, seed, SETTINGS, prefill=1, decode=1)
    return seen[0]


@pytest.mark.field("vllm-project/vllm#45561", "vllm-project/vllm#40004", "vllm-project/vllm#54530")
def test_a_flood_costs_interactive_requests_a_chunk_at_most_and_keeps_most_of_its_tokens() -> None:
    idle, alone, both = run(1, "throughput")
    assert both.worst_ms <= 2 * idle.worst_ms + 1000 * CHUNK_S
    assert both.tokens_per_s >= 0.7 * alone.tokens_per_s


@pytest.mark.slow
def test_without_profiles_the_same_flood_makes_them_wait() -> None:
    """Or the test above would show nothing."""
    idle, _, both = run(1, "interactive")
    assert statistics.median(both.ttft_ms) > 2 * idle.worst_ms + 1000 * CHUNK_S
