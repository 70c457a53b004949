"""Requests that are left, refused or too late: the work ends with them, at every hop, and others are unharmed."""

import threading

import grpc
import pytest
from cluster import Stub, greedy, wait_idle
from moments import ENDLESS, LONG_PROMPT, MOMENTS, SOON_S, Caught, catch
from pushes import hold
from services import Deployment
from streams import Golden, Stream, prompt_of


@pytest.mark.field("vllm-project/vllm#10583", "sgl-project/sglang#19035")
async def test_a_live_id_is_refused_and_its_owner_unharmed(linked: Deployment, stub: Stub, golden: Golden) -> None:
    request = greedy(prompt_of(100, 40), 100)
    expected, gate = await golden(request), threading.Event()
    request.request_id = "id-7"
    linked.faults.append(hold(1, gate))  # so that it lives on
    first = await Stream(stub, request).until(1)
    error = await Stream(stub, request).failure()
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "id-7" in (error.details() or "")
    gate.set()
    assert (await first.rest()).token_ids == expected.token_ids
    assert (await Stream(stub, request).rest()).token_ids == expected.token_ids


@pytest.mark.slow
@pytest.mark.field("vllm-project/vllm#50425", "llm-d/llm-d#1138")
async def test_fifty_clients_that_leave_between_prefill_and_decode_cost_nothing(
    linked: Deployment, stub: Stub, golden: Golden
) -> None:
    for number in range(50):
        gate = threading.Event()
        linked.faults.append(hold(0, gate))  # no page reaches a decode worker
        stream = await Stream(stub, greedy(prompt_of(200 + number, 1000), 50)).until(1)
        stream.cancel()
        try:
            await wait_idle(stub, SOON_S)  # while the pages are still held up
        finally:
            gate.set()
    request = greedy(prompt_of(250, 1000), 50)
    assert (await Stream(stub, request).rest()).token_ids == (await golden(request)).token_ids


@pytest.mark.field("ollama/ollama#11889", "ggml-org/llama.cpp#15232", "ikawrakow/ik_llama.cpp#1020")
async def test_a_cancel_amid_a_long_prompt_stops_it_at_the_next_chunk(linked: Deployment, stub: Stub) -> None:
    before = await num_prefilled(stub)
    caught = await catch(linked, stub, "prefilling", number=51)
    caught.stream.cancel()
    caught.prefill.resume()
    assert await num_prefilled(stub) - before < LONG_PROMPT * caught.num_tries


async def num_prefilled(stub: Stub) -> int:
    status = await wait_idle(stub, SOON_S)
    return sum(worker.load.prefill_tokens for worker in status.workers)


@pytest.mark.field("Avarok-Cybersecurity/atlas#482", "tensorflow/serving#1265")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_deadline_ends_a_request_wherever_it_is(linked: Deployment, stub: Stub, moment: str) -> None:
    caught = await catch_before_its_deadline(linked, stub, moment)
    error = await caught.stream.failure()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    caught.prefill.resume()
    await wait_idle(stub, SOON_S)  # while its pages are still held up, if they were
    caught.gate.set()


async def catch_before_its_deadline(linked: Deployment, stub: Stub, moment: str) -> Caught:
    """One that gets there in time, however busy the machine is."""
    for timeout_s in (1.0, 5.0, 25.0):
        number = 610 + 10 * MOMENTS.index(moment) + round(timeout_s)
        try:
            return await catch(linked, stub, moment, number, timeout_s=timeout_s, num_tokens=ENDLESS)
        except grpc.aio.AioRpcError as error:  # a prompt that would take longer is not let in
            assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
            linked.faults.clear()
    raise AssertionError("no request got there in time")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_is_cut_off_is_a_client_that_left(linked: Deployment, stub: Stub, moment: str) -> None:
    caught = await catch(linked, stub, moment, number=71 + MOMENTS.index(moment), num_tokens=ENDLESS)
    linked.calls["router-0"].cut()
    assert (await caught.stream.failure()).code() is grpc.StatusCode.UNAVAILABLE
    linked.calls["router-0"].heal()
    caught.prefill.resume()
    async with linked.stub(router=1) as other:
        await wait_idle(other, SOON_S)
    caught.gate.set()


@pytest.mark.field("NVIDIA/TensorRT-LLM#5762", "sgl-project/sglang#32897")
@pytest.mark.parametrize(("num_prompt", "number", "stop"), [(15, 130, "&"), (16, 20, " "), (17, 17, "&")])
async def test_a_stop_string_that_the_last_token_completes_costs_no_token_and_none_twice(
    linked: Deployment, stub: Stub, golden: Golden, num_prompt: int, number: int, stop: str
) -> None:
    request = greedy(prompt_of(99_000 + number, num_prompt), 20)
    whole = await golden(request)
    request.stop_strings.append(stop)
    answer, expected = await Stream(stub, request).rest(), await golden(request)
    assert answer.token_ids == expected.token_ids == whole.token_ids
    assert (answer.reason, answer.text, answer.usage) == ("stop", whole.text.removesuffix(stop), whole.usage)
