"""What metrics say is what clients see: first tokens, whatever comes between, and hits of the prefix cache."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from moments import SOON_S
from prometheus_client.parser import text_string_to_metric_families
from services import Deployment
from sim.nodes import Settings
from sim.world import CANCELLED, OK, Request, World, simulate
from streams import prompt_of

from pageferry.core.config import SchedulerConfig
from pageferry.router.workers import Role

TTFT = "pageferry_time_to_first_token_seconds"
FIRST_TOKENS = pytest.mark.field(
    "vllm-project/vllm#6337",
    "vllm-project/vllm#8115",
    "vllm-project/vllm#13169",
    "inference-sim/inference-sim#1122",
    "llm-d/llm-d-inference-sim#266",
)


def value(world: World, name: str) -> float:
    return world.router.metrics.registry.get_sample_value(name) or 0.0


async def check_first_tokens(world: World, requests: Sequence[Request]) -> None:
    """Each is counted once, with what its client has measured, which waits for the network, too."""
    await world.until(lambda: all(request.outcome for request in requests), 600, "all are over")
    told = []
    for request in requests:
        request.check(world.settings, (OK,))
        assert request.answer.finished is not None
        told.append(request.answer.finished.timings.ttft_ms / 1000)
        assert told[-1] == pytest.approx(request.first - request.began, rel=0.05)
    assert value(world, f"{TTFT}_count") == len(requests)
    assert value(world, f"{TTFT}_sum") == pytest.approx(sum(told))


def scheduler_of(max_num_seqs: int) -> SchedulerConfig:
    return SchedulerConfig(chunk_tokens=64, local_chunk_tokens=64, headroom_pages=0, max_num_seqs=max_num_seqs)


def request_of(number: int, num_prompt: int = 60, num_tokens: int = 5) -> Request:
    return Request(f"r{number}", [1 + number, *range(2, num_prompt + 1)], num_tokens)


@FIRST_TOKENS
def test_each_time_to_first_token_is_what_the_client_sees() -> None:
    """One after the other, and ten at once; prompts in one chunk and in many; one that is cancelled before."""

    async def scenario(world: World) -> None:
        requests = [world.ask(request_of(number, num_prompt)) for number, num_prompt in enumerate((60, 300))]
        gone = world.ask(request_of(99, 200))
        await world.until(lambda: bool(gone.answer.started), 10, "the last one is begun")
        assert gone.task is not None
        gone.task.cancel()
        await world.until(lambda: all(request.outcome for request in (*requests, gone)), 60)
        assert (gone.outcome, gone.first) == (CANCELLED, 0.0)
        for number in range(2, 10):
            requests.append(world.ask(request_of(number)))
            await world.until(lambda: bool(requests[-1].outcome), 60)
        requests += [world.ask(request_of(number)) for number in range(10, 20)]
        await check_first_tokens(world, requests)

    simulate(scenario, settings=Settings(num_pages=256, scheduler=scheduler_of(8)))


@FIRST_TOKENS
def test_the_wait_in_the_queue_is_in_the_time_to_first_token() -> None:
    """Fifty at once, where one is served at a time."""

    async def scenario(world: World) -> None:
        requests = [world.ask(request_of(number)) for number in range(50)]
        await check_first_tokens(world, requests)
        waits = sorted(request.first - request.began for request in requests)
        assert waits[-1] > 20 * waits[0]
        assert value(world, "pageferry_queue_seconds_sum") > 0.5 * sum(waits)

    simulate(scenario, settings=Settings(scheduler=scheduler_of(1)), prefill=1, decode=1)


@FIRST_TOKENS
def test_a_preemption_neither_repeats_nor_resets_the_time_to_first_token() -> None:
    """Two answers that together need more pages than there are."""
    settings = Settings(num_pages=45, scheduler=scheduler_of(4))

    async def scenario(world: World) -> None:
        requests = [world.ask(request_of(number, num_tokens=60)) for number in range(2)]
        await check_first_tokens(world, requests)
        (decode,) = world.router.fleet.of(Role.DECODE)
        await world.until(lambda: decode.view.load.preemptions > 0, 5, "a sequence was preempted")

    simulate(scenario, settings=settings, prefill=1, decode=1)


@FIRST_TOKENS
async def test_streams_and_whole_answers_are_counted_alike_over_http(linked: Deployment) -> None:
    router = linked.routers[0]
    async with httpx.AsyncClient(base_url=router.http, timeout=SOON_S) as client:

        async def count() -> float:
            text = (await client.get("/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            return next(sample.value for sample in samples if sample.name == f"{TTFT}_count")

        async def ask(number: int) -> None:
            body = {"prompt": prompt_of(98_000 + number, 60), "max_tokens": 4, "stream": number % 2 == 0}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200
            assert "[DONE]" in response.text or not body["stream"]

        before = await count()
        await asyncio.gather(*map(ask, range(20)))
        assert await count() == before + 20
