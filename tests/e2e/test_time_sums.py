"""The parts of a request's time add up to the whole (to 1 %), in virtual time, where a message takes next to none."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import golden
from opentelemetry.sdk.trace import ReadableSpan
from sim import faults
from sim.nodes import Settings
from sim.world import OK, Request, World, simulate

from pageferry.core.config import RouterConfig

STEP_S = 1.0  # against which the way of a message, under 1 ms, is less than 1 %
TTFT = ("tokenize", "queue", "reserve", "prefill_queue", "prefill", "delivery")
SECOND = ("transfer_tail", "decode_queue", "first_step", "delivery")
PROMPT = [1 + (index * 7) % 50 for index in range(20)]  # three chunks
SPLIT = Settings()
LOCAL = replace(SPLIT, router=RouterConfig(local_prefill_tokens=1000))
FEW_PAGES = 13  # of 4 tokens: two requests' prompts, and not their answers
Scenario = Callable[[World], Awaitable[None]]


def spans_of(scenario: Scenario, settings: Settings = SPLIT, **workers: int) -> list[ReadableSpan]:
    """All that ended, of all processes that there were."""
    ended: list[ReadableSpan] = []

    async def main(world: World) -> None:
        for node in world.workers:
            node.model.runner.step_s, node.model.runner.token_s = STEP_S, 0.0
        counts = [node.spans for node in world.nodes]  # of those that may be killed
        await scenario(world)
        await world.until_idle(30)
        for count in {id(count): count for count in (*counts, *(node.spans for node in world.nodes))}.values():
            ended.extend(count.ended)

    simulate(main, 0, settings, **workers)
    return ended


def attributes_of(spans: list[ReadableSpan], name: str) -> list[dict[str, Any]]:
    return [dict(span.attributes or {}) for span in spans if span.name == name]


def check_tree(spans: list[ReadableSpan]) -> None:
    """One trace, no orphan. Of workers, only durations mean anything here: the wall clock stands still."""
    assert len({span.context.trace_id for span in spans}) == 1
    ids = {span.context.span_id for span in spans}
    assert [span.name for span in spans if span.parent is None] == ["pageferry.request"]
    assert [span.name for span in spans if span.parent is not None and span.parent.span_id not in ids] == []


def check_sums(request: dict[str, Any], *, of_workers: bool) -> None:
    """`of_workers`: what workers have told is all of it, to 1 %; else a try that failed is in the remainder."""
    for prefix, parts, whole_ms in (
        ("ttft", TTFT, 1000 * request["gen_ai.server.time_to_first_token"]),
        ("second_token", SECOND, request["pageferry.second_token.gap_ms"]),
    ):
        told = [request[f"pageferry.{prefix}.{part}_ms"] for part in parts]
        assert sum(told) == pytest.approx(whole_ms, rel=0.01)
        assert whole_ms >= 500, "the request took its time"
        assert min(told[:-1]) >= 0
        if of_workers:
            assert sum(told[:-1]) == pytest.approx(whole_ms, rel=0.01), dict(zip(parts, told, strict=True))


async def ask(world: World, request: Request) -> None:
    task = world.ask(request).task
    assert task is not None
    await task
    assert request.outcome == OK


@pytest.mark.parametrize("settings", [SPLIT, LOCAL], ids=["handed over", "computed by the decode worker"])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_parts_add_up(settings: Settings, num_answers: int) -> None:
    async def scenario(world: World) -> None:
        await ask(world, Request("r", PROMPT, 6, num_answers=num_answers))

    spans = spans_of(scenario, settings)
    check_tree(spans)
    (request,) = attributes_of(spans, "pageferry.request")
    check_sums(request, of_workers=True)
    chunks = [chunk["pageferry.chunk.tokens"] for chunk in attributes_of(spans, "prefill.chunk")]
    assert len(chunks) >= 3
    assert request["pageferry.ttft.prefill_ms"] >= 2000, "of three steps"


@pytest.mark.parametrize("settings", [SPLIT, LOCAL], ids=["handed over", "computed by the decode worker"])
def test_the_parts_of_a_request_that_a_stop_string_ended_add_up(settings: Settings) -> None:
    """The router ends its calls then, and no worker says what it took at the end."""
    third = golden(PROMPT, 3, settings.layout)[-1]

    async def scenario(world: World) -> None:
        await ask(world, Request("r", PROMPT, 50, stop=f"w{third}."))

    (request,) = attributes_of(spans_of(scenario, settings), "pageferry.request")
    assert request["gen_ai.response.finish_reasons"] == ("stop",)
    check_sums(request, of_workers=True)


def test_the_parts_of_a_preempted_request_add_up() -> None:
    requests = [Request(f"r{number}", [number + 1, *PROMPT[1:]], 20) for number in range(2)]

    async def scenario(world: World) -> None:
        await asyncio.gather(*(ask(world, request) for request in requests))

    spans = spans_of(scenario, replace(SPLIT, num_pages=FEW_PAGES), prefill=1, decode=1)
    assert any(generated["pageferry.preemptions"] for generated in attributes_of(spans, "decode.generate"))
    roots = attributes_of(spans, "pageferry.request")
    assert len(roots) == 2
    for root in roots:
        check_sums(root, of_workers=True)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_the_parts_of_a_resumed_request_add_up(num_tokens: int) -> None:
    """Its decode worker dies once so many tokens are there: before the second one, that is in its remainder."""

    async def scenario(world: World) -> None:
        request = Request("r", PROMPT, 8)
        asking = asyncio.create_task(ask(world, request))
        await world.until(lambda: len(request.answer.token_ids) >= num_tokens, 60)
        (busy,) = (node for node in world.decodes if node.worker.num_calls)
        faults.kill(world, busy, 100.0)
        await asking

    spans = spans_of(scenario)
    check_tree(spans)
    (request,) = attributes_of(spans, "pageferry.request")
    assert request["pageferry.resumed_at"] == num_tokens
    check_sums(request, of_workers=num_tokens > 1)


def test_a_try_that_failed_before_the_first_token_is_in_the_remainder() -> None:
    async def scenario(world: World) -> None:
        request = Request("r", PROMPT, 6)
        asking = asyncio.create_task(ask(world, request))
        await world.until(lambda: any(node.worker.num_calls for node in world.prefills), 60)
        await asyncio.sleep(1.5 * STEP_S)
        (busy,) = (node for node in world.prefills if node.worker.num_calls)
        faults.kill(world, busy, 100.0)
        await asking

    (request,) = attributes_of(spans_of(scenario), "pageferry.request")
    assert request["pageferry.fallback"]
    check_sums(request, of_workers=False)
    assert request["pageferry.ttft.delivery_ms"] >= 1000 * STEP_S
