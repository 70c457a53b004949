"""Each service killed, or stopped without a word, at several moments of a request: who can finish it does."""

import asyncio

import grpc
import pytest
from cluster import Stub, greedy
from moments import ENDLESS, MOMENTS, SILENT_S, SOON_S, at_rest, catch, silences, until_missed
from services import Deployment
from streams import Golden, Stream, prompt_of, request_span
from traces import PREFILL_RPC, SPLIT_SPANS, wait_trace


@pytest.mark.field("ai-dynamo/dynamo#7930", "vllm-project/aibrix#2289", "tenstorrent/tt-inference-server#3926")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_is_killed(linked: Deployment, stub: Stub, golden: Golden, victim: str, moment: str) -> None:
    caught = await catch(linked, stub, moment, number=1 + MOMENTS.index(moment) + 3 * (victim == "decode"))
    caught.service(victim).kill()
    caught.gate.set()
    if moment == "prefilling" and victim == "decode":
        caught.prefill.resume()
    async with asyncio.timeout(SOON_S):
        answer = await caught.stream.rest()
    assert answer.token_ids == (await golden(caught.request)).token_ids
    await at_rest(stub, [service for service in linked.workers if service.is_alive], linked)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.field("vllm-project/vllm#46283", "llm-d/llm-d#2433")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_stops_without_a_word(
    linked: Deployment, stub: Stub, golden: Golden, victim: str, moment: str
) -> None:
    number, before = 11 + MOMENTS.index(moment) + 3 * (victim == "decode"), silences(linked)
    caught = await catch(linked, stub, moment, number, timeout_s=SILENT_S)
    caught.service(victim).pause()
    caught.gate.set()
    if moment == "prefilling" and victim == "decode":
        caught.prefill.resume()
    answer = await caught.stream.rest()
    assert answer.token_ids == (await golden(caught.request)).token_ids
    await until_missed(linked, caught.service(victim), before)
    caught.service(victim).resume()  # late: what it still had is over


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_router_is_killed(linked: Deployment, stub: Stub, golden: Golden, moment: str) -> None:
    async with linked.stub(router=1) as other:
        caught = await catch(linked, stub, moment, number=21 + MOMENTS.index(moment), num_tokens=ENDLESS)
        linked.routers[0].kill()
        caught.prefill.resume()
        error = await caught.stream.failure()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await at_rest(other, linked.workers, linked)
        caught.gate.set()
        request = greedy(prompt_of(24_000, 100), 20)
        assert (await Stream(other, request).rest()).token_ids == (await golden(request)).token_ids


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_router_stops_for_a_while(linked: Deployment, stub: Stub, golden: Golden, moment: str) -> None:
    caught = await catch(linked, stub, moment, number=31 + MOMENTS.index(moment))
    linked.routers[0].pause()
    caught.gate.set()
    caught.prefill.resume()
    await asyncio.sleep(0.5)  # time for the workers to go on without it
    linked.routers[0].resume()
    assert (await caught.stream.rest()).token_ids == (await golden(caught.request)).token_ids


@pytest.mark.field("vllm-project/aibrix#2289")
async def test_a_trace_shows_the_failed_prefill_beside_what_came_after_it(linked: Deployment, stub: Stub) -> None:
    caught = await catch(linked, stub, "prefilling", number=41)
    caught.prefill.kill()
    await caught.stream.rest()
    span = await request_span(stub, caught.stream.trace_id)
    assert span.attributes["pageferry.fallback"] == "other_prefill"
    spans = await wait_trace(stub, caught.stream.trace_id, SPLIT_SPANS, timeout_s=SOON_S)
    tries = [
        one.attributes["rpc.response.status_code"] for one in spans if (one.name, one.kind) == (PREFILL_RPC, "CLIENT")
    ]
    assert sorted(tries) == ["OK", "UNAVAILABLE"]
