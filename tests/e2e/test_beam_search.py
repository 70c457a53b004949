"""Beam searches through real processes: transformers' answers, on pages that were handed over, and none left behind."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cluster import LONG_LEASES, Cluster, Stub, connected, generate, running, wait_idle
from transformers import GenerationConfig, LlamaForCausalLM

from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

WIDTH = 4
PROMPT = [*range(10, 60)]
SETTINGS = {
    "router.local_prefill_tokens": "0",
    "router.local_advantage": "1e9",
    "engine.num_pages": "1024",
    "engine.page_format": "fp32",
    "engine.compute_dtype": "fp32",
    "scheduler.max_num_seqs": "8",
    **LONG_LEASES,
}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker, in fp32."""
    with running("--prefill", "1", "--decode", "1", "--model", str(tiny_model), settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[Stub]:
    async with connected(cluster) as stub:
        yield stub
        await wait_idle(stub)


def ask(prompt: list[int], max_tokens: int, *, n: int = WIDTH, width: int = WIDTH) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        n=n,
        beam=types.BeamSearch(width=width, early_stopping=types.EARLY_STOPPING_NEVER),
        stop=types.StopConditions(max_tokens=max_tokens, stop_token_ids=range(0, 320, 7)),
    )


def expected(tiny_model: Path, request: pb.GenerateRequest) -> list[tuple[list[int], float]]:
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ends = sorted({2, *request.stop.stop_token_ids})
    model.generation_config = GenerationConfig()
    config = GenerationConfig(
        num_beams=request.beam.width,
        num_return_sequences=request.n,
        early_stopping="never",
        eos_token_id=ends,
        pad_token_id=ends[0],
        max_new_tokens=request.stop.max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
    )
    made = model.generate(torch.tensor([[*request.token_ids.ids]]), generation_config=config)
    outputs = [row[len(request.token_ids.ids) :].tolist() for row in made.sequences]
    cut = [output[: next((i + 1 for i, one in enumerate(output) if one in ends), len(output))] for output in outputs]
    return list(zip(cut, made.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_answers_are_transformers_own(stub: Stub, tiny_model: Path, max_tokens: int) -> None:
    request = ask(PROMPT, max_tokens)
    answer = await generate(stub, request)
    wanted = expected(tiny_model, request)
    found = [answer.choices[choice] for choice in range(WIDTH)]
    assert [one.token_ids for one in found] == [token_ids for token_ids, _ in wanted]
    assert [one.score for one in found] == pytest.approx([score for _, score in wanted], abs=1e-4)
    assert answer.finished is not None
    assert answer.finished.pages.shipped + answer.finished.pages.cached == -(-len(PROMPT) // 16)
    assert answer.usage.completion_tokens == sum(len(token_ids) for token_ids, _ in wanted)


async def test_searches_share_the_worker_with_each_other_and_with_plain_answers(stub: Stub, tiny_model: Path) -> None:
    requests = [ask([seed, *PROMPT], 24) for seed in range(100, 104)]
    plain = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), stop=types.StopConditions(max_tokens=24))
    answers = await asyncio.gather(*(generate(stub, request) for request in (*requests, plain, plain)))
    for request, answer in zip(requests, answers, strict=False):
        found = [answer.choices[choice].token_ids for choice in range(WIDTH)]
        assert found == [token_ids for token_ids, _ in expected(tiny_model, request)]


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
async def test_nothing_is_left_of_a_search_that_is_given_up(stub: Stub, ends_by: str) -> None:
    request = ask(PROMPT, 3900)
    del request.stop.stop_token_ids[:]
    request.stop.ignore_eos = True
    call = await let_in(stub, request, (None,) if ends_by == "cancel" else (1.0, 5.0, 25.0))
    if ends_by == "cancel":
        async with asyncio.timeout(60):
            while not any(worker.load.running >= WIDTH for worker in await workers(stub)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        call.cancel()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_idle(stub)


async def let_in(stub: Stub, request: pb.GenerateRequest, timeouts_s: tuple[float | None, ...]) -> Any:
    """The first call that was let in before its deadline: a busy machine may take longer than the shortest."""
    for timeout_s in timeouts_s:
        call = stub.Generate(request, timeout=timeout_s)
        with suppress(grpc.aio.AioRpcError):
            assert isinstance(await call.read(), pb.GenerateResponse)
            return call
    raise AssertionError("no call was let in")


async def workers(stub: Stub) -> list[pb.WorkerStatus]:
    return list((await stub.GetStatus(pb.GetStatusRequest())).workers)


async def test_a_width_above_the_slots_is_refused(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"beam.width is 9, must be at most 8") as caught:
        await generate(stub, ask(PROMPT, 4, width=9))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
