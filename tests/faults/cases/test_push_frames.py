"""Frames of a push that are lost, doubled, changed or late: never run on, and answered as if nothing had been."""

import threading

import pytest
from cluster import Stub, greedy
from pushes import (
    Fault,
    break_off,
    commit_first,
    commit_twice,
    drop,
    duplicate,
    flip,
    hold,
    misplace,
    reorder,
    truncate,
)
from services import Deployment
from streams import Golden, Stream, prompt_of, request_span

NUM_FRAMES = 6  # of the prompts here, a page each
BROKEN = {
    "the first is lost": drop(0),
    "the fourth is lost": drop(3),
    "the last is lost": drop(NUM_FRAMES - 1),
    "one comes twice": duplicate(2),
    "a bit of the first is flipped": flip(0),
    "a bit of the last is flipped": flip(NUM_FRAMES - 1, bit=12_345),
    "one is cut short": truncate(1),
    "one names another's place": misplace(1, to=4),
    "one names a place outside": misplace(1, to=1000),
    "the stream breaks before the first": break_off(0),
    "the stream breaks before the last": break_off(NUM_FRAMES - 1),
    "the commit comes before the last": commit_first,
}


@pytest.mark.field("vllm-project/vllm-ascend#12522", "vllm-project/vllm#49250", "vllm-project/vllm#50754")
@pytest.mark.parametrize("fault", BROKEN)
async def test_a_frame_that_is_wrong_costs_another_prefill_and_no_token(
    linked: Deployment, stub: Stub, golden: Golden, fault: str
) -> None:
    request = greedy(prompt_of(list(BROKEN).index(fault), 16 * NUM_FRAMES), 12)
    expected = await golden(request)
    linked.faults.extend([BROKEN[fault]])
    stream = Stream(stub, request)
    answer = await stream.rest()
    assert answer.token_ids == expected.token_ids
    span = await request_span(stub, stream.trace_id)
    assert span.attributes["pageferry.fallback"] == "other_prefill"


@pytest.mark.field("vllm-project/vllm-ascend#12522")
async def test_two_broken_pushes_leave_the_prompt_to_the_decode_worker(
    linked: Deployment, stub: Stub, golden: Golden
) -> None:
    request = greedy(prompt_of(20, 16 * NUM_FRAMES), 12)
    expected = await golden(request)
    linked.faults.extend([flip(3), drop(3)])
    stream = Stream(stub, request)
    assert (await stream.rest()).token_ids == expected.token_ids
    assert (await request_span(stub, stream.trace_id)).attributes["pageferry.fallback"] == "local"


@pytest.mark.parametrize("fault", [reorder, commit_twice], ids=["in the opposite order", "a second commit"])
async def test_what_a_receiver_can_bear_costs_nothing(
    linked: Deployment, stub: Stub, golden: Golden, fault: Fault
) -> None:
    request = greedy(prompt_of(30 + (fault is reorder), 16 * NUM_FRAMES), 12)
    expected = await golden(request)
    linked.faults.extend([fault])
    stream = Stream(stub, request)
    answer = await stream.rest()
    assert answer.token_ids == expected.token_ids
    assert answer.finished is not None
    assert answer.finished.pages.shipped == NUM_FRAMES
    assert "pageferry.fallback" not in (await request_span(stub, stream.trace_id)).attributes


@pytest.mark.parametrize("number", [0, 3])
async def test_the_first_token_does_not_wait_for_late_pages(
    linked: Deployment, stub: Stub, golden: Golden, number: int
) -> None:
    request = greedy(prompt_of(40 + number, 16 * NUM_FRAMES), 12)
    expected, gate = await golden(request), threading.Event()
    linked.faults.extend([hold(number, gate)])
    stream = Stream(stub, request)
    try:
        await stream.until(1)
    finally:
        gate.set()
    assert (await stream.rest()).token_ids == expected.token_ids
