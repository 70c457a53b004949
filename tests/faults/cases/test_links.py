"""Networks that are late, slow, silent or gone, on each way between services."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cluster import Stub, greedy
from links import TcpLink
from moments import MOMENTS, SILENT_S, SOON_S, at_rest, catch, num_shipped, silences, until, until_missed
from services import Deployment
from streams import Golden, Stream, prompt_of, request_span

WAYS = ("client to router", "router to prefill", "router to decode", "prefill to decode")


def ways(linked: Deployment, way: str) -> list[TcpLink]:
    if way == "prefill to decode":
        return list(linked.pages.values())
    role = way.rpartition(" ")[2]
    return [link for name, link in linked.calls.items() if name.startswith(role)]


@pytest.mark.parametrize("way", WAYS)
async def test_a_way_that_takes_long_changes_no_token(linked: Deployment, stub: Stub, golden: Golden, way: str) -> None:
    number = WAYS.index(way)
    requests = [greedy(prompt_of(80_000 + 10 * number + index, 100), 20) for index in range(4)]
    for link in ways(linked, way):
        link.delay_s = 0.05
    answers = await asyncio.gather(*(Stream(stub, request).rest() for request in requests))
    assert [a.token_ids for a in answers] == [(await golden(request)).token_ids for request in requests]


@pytest.mark.parametrize("way", ["router to decode", "prefill to decode"])
async def test_a_way_that_is_narrow_changes_no_token(linked: Deployment, stub: Stub, golden: Golden, way: str) -> None:
    request = greedy(prompt_of(80_100 + WAYS.index(way), 400), 20)
    for link in ways(linked, way):
        link.bytes_per_s = 400_000  # pages of half a second
    assert (await Stream(stub, request).rest()).token_ids == (await golden(request)).token_ids


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS[1:])
async def test_a_way_that_breaks_costs_no_request(
    linked: Deployment, stub: Stub, golden: Golden, way: str, moment: str
) -> None:
    caught = await catch(linked, stub, moment, number=100 + MOMENTS.index(moment) + 3 * WAYS.index(way))
    links = linked.pages if way == "prefill to decode" else linked.calls
    link = links[(caught.prefill if way == "router to prefill" else caught.decode).name]
    link.cut()
    caught.prefill.resume()
    caught.gate.set()
    async with asyncio.timeout(SOON_S):
        answer = await caught.stream.rest()
    assert answer.token_ids == (await golden(caught.request)).token_ids


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_the_router_hears_no_more_is_given_up(
    linked: Deployment, stub: Stub, golden: Golden, role: str, moment: str
) -> None:
    number, before = 120 + MOMENTS.index(moment) + 3 * (role == "decode"), silences(linked)
    caught = await catch(linked, stub, moment, number, timeout_s=SILENT_S)
    linked.calls[caught.service(role).name].black_hole()
    caught.prefill.resume()
    caught.gate.set()
    answer = await caught.stream.rest()
    assert answer.token_ids == (await golden(caught.request)).token_ids
    await until_missed(linked, caught.service(role), before)


@pytest.fixture(scope="module")
def hasty(tiny_model: Path) -> Iterator[Deployment]:
    """Hand-offs are given up after a second of silence."""
    settings = {"handoff.lease_ms": "1000", "scheduler.max_num_seqs": "8"}
    of_role = {"prefill": {"engine.num_pages": "300"}}
    with Deployment(prefill=1, decode=1, settings=settings, of_role=of_role, model=tiny_model, linked=True) as found:
        yield found


@pytest.fixture
async def hasty_stub(hasty: Deployment) -> AsyncIterator[Stub]:
    async with hasty.lent() as stub:
        yield stub


@pytest.mark.field("aws-samples/aws-do-eks#84", "vllm-project/vllm#47021")
async def test_pages_that_come_after_the_lease_are_never_run_on(
    hasty: Deployment, hasty_stub: Stub, golden: Golden
) -> None:
    request = greedy(prompt_of(82_000, 2000), 20)
    before = num_shipped(hasty)
    hasty.pages["decode-0"].bytes_per_s = 100_000  # 2 MB of pages: it is shut long before the last
    stream = Stream(hasty_stub, request)
    await until(lambda: num_shipped(hasty) > before, "a page is shipped")
    hasty.pages["decode-0"].black_hole()
    # Meanwhile others use the prefill worker's pages again.
    await asyncio.gather(
        *(Stream(hasty_stub, greedy(prompt_of(82_001 + index, 1000), 1)).rest() for index in range(20))
    )
    answer = await stream.rest()
    assert answer.token_ids == (await golden(request)).token_ids
    span = await request_span(hasty_stub, stream.trace_id)
    assert span.attributes["pageferry.fallback"] == "local"
    hasty.pages["decode-0"].heal()  # what was on its way comes late, and is refused
    again = greedy(prompt_of(82_100, 300), 20)
    assert (await Stream(hasty_stub, again).rest()).token_ids == (await golden(again)).token_ids


@pytest.mark.field("vllm-project/vllm#46283", "vllm-project/vllm#46289")
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=(pytest.mark.slow, pytest.mark.timeout(900)))])
async def test_a_client_leaves_while_the_sender_hangs_and_then_dies(
    linked: Deployment, stub: Stub, golden: Golden, times: int
) -> None:
    for number in range(times):
        caught = await catch(linked, stub, "prefilling", number=140 + number + times)
        caught.stream.cancel()
        await at_rest(stub, linked.decode, linked)  # though the sender has said nothing
        caught.prefill.kill()
        caught.prefill.start()
        caught.prefill.wait_ready()
    request = greedy(prompt_of(82_200 + times, 300), 20)
    assert (await Stream(stub, request).rest()).token_ids == (await golden(request)).token_ids
