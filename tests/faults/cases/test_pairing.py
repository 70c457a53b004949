"""Workers that come back as others: with another layout or model they are refused by name, with the same they serve."""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import Stub, generate, greedy, wait_idle
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from moments import SOON_S
from services import Deployment, Service
from streams import Stream, prompt_of
from tiny_model import write_tiny_model

from pageferry.v1 import inference_pb2 as pb

# What a prefill worker comes back with, and the words of both sides that tell them apart.
MISFITS = {
    "page size": ({"engine.page_size": "32"}, ("page_size 32", "16")),
    "format": ({"engine.page_format": "int4"}, ("format int4", "int8")),
    "granularity": ({"engine.page_format": "int8:channel"}, ("format int8:channel", "int8")),
    "keys and values apart": ({"engine.page_format": "k=int8,v=int4"}, ("format k=int8,v=int4", "int8")),
    "cache layers": ({"engine.cache_layers": "0-1=window:64,sinks:4;2-3=full"}, ("window:64,sinks:4", "0-3=full")),
    "weights": ({"engine.model": "other weights"}, ("fingerprint",)),
}


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(prefill=1, decode=1, settings={"engine.page_format": "int8"}, model=tiny_model) as deployment:
        yield deployment


@pytest.fixture
async def pair_stub(pair: Deployment, tiny_model: Path) -> AsyncIterator[Stub]:
    own = {"engine.page_size": "16", "engine.page_format": "int8", "engine.cache_layers": ""}
    async with pair.stub() as stub:
        yield stub
        if pair.prefill[0].settings != (wanted := pair.prefill[0].settings | own | {"engine.model": str(tiny_model)}):
            pair.prefill[0].restart(wanted)
        pair.restore()
        await wait_idle(stub)


async def is_serving(service: Service) -> bool:
    async with grpc.aio.insecure_channel(service.address) as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(), timeout=60)
    return answer.status == HealthCheckResponse.SERVING


async def wait_state(stub: Stub, role: str, state: str, timeout_s: float = 60) -> pb.WorkerStatus:
    end = time.monotonic() + timeout_s
    while True:
        status = await stub.GetStatus(pb.GetStatusRequest())
        (worker,) = [worker for worker in status.workers if worker.role == role]
        if worker.state == state:
            return worker
        assert time.monotonic() < end, f"{worker.state}: {worker.reason}"


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
@pytest.mark.parametrize("what", MISFITS)
async def test_a_worker_that_came_back_as_another_is_refused_by_both_values(
    pair: Deployment, pair_stub: Stub, tmp_path: Path, what: str
) -> None:
    changes, words = MISFITS[what]
    if "engine.model" in changes:
        changes = {"engine.model": str(write_tiny_model(tmp_path / "tiny", seed=1))}
    assert await is_serving(pair.routers[0])
    pair.prefill[0].restart(changes)
    refused = await wait_state(pair_stub, "prefill", "refused")
    assert all(word in refused.reason for word in words), refused.reason
    assert not await is_serving(pair.routers[0])
    (last,) = [event for event in pair.routers[0].events() if event["event"] == "not_ready"][-1:]
    assert any(word in str(last["unready"]) for word in words)
    before = refused.load.prefill_tokens
    error = await Stream(pair_stub, greedy(prompt_of(90_000, 100), 8)).failure()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    after = await wait_state(pair_stub, "prefill", "refused")
    assert after.load.prefill_tokens == before


@pytest.mark.field("vllm-project/vllm#42895")
async def test_a_decode_worker_with_another_model_is_refused_by_both_names(
    pair: Deployment, pair_stub: Stub, tiny_model: Path, tmp_path: Path
) -> None:
    pair.decode[0].restart({"engine.model": str(write_tiny_model(tmp_path / "large"))})
    refused = await wait_state(pair_stub, "decode", "refused")
    assert all(word in refused.reason for word in ("'large'", "'tiny'"))
    assert not await is_serving(pair.routers[0])
    assert (await Stream(pair_stub, greedy([5], 8)).failure()).code() is grpc.StatusCode.UNAVAILABLE
    pair.decode[0].restart({"engine.model": str(tiny_model)})


@pytest.mark.field("kvcache-ai/Mooncake#3072")
async def test_a_decode_worker_that_came_back_is_shipped_to_at_once(pair: Deployment, pair_stub: Stub) -> None:
    prompt = prompt_of(91_000, 100)
    first = await generate(pair_stub, greedy(prompt, 8))
    for _ in range(3):
        pair.decode[0].restart()
        pair.decode[0].wait_ready()
        await wait_idle(pair_stub)  # the router has found it again
        answer = await generate(pair_stub, greedy(prompt, 8))
        assert answer.token_ids == first.token_ids
        assert answer.finished is not None
        assert answer.finished.pages.shipped == 7


@pytest.mark.field("llm-d/llm-d-router#2853")
async def test_what_a_worker_had_cached_is_forgotten_with_it(pair: Deployment, pair_stub: Stub) -> None:
    prompt = prompt_of(92_000, 320)
    first, warm = [await generate(pair_stub, greedy(prompt, 8)) for _ in range(2)]
    assert (first.usage.cached_tokens, warm.usage.cached_tokens) == (0, 319)
    for worker in (pair.prefill[0], pair.decode[0]):
        worker.restart()
    pair.wait_ready()
    await wait_idle(pair_stub, SOON_S)
    cold = await generate(pair_stub, greedy(prompt, 8))
    assert cold.usage.cached_tokens == 0
    assert cold.token_ids == first.token_ids == warm.token_ids
    assert cold.finished is not None
    assert cold.finished.pages.shipped == 20


@pytest.mark.field("sgl-project/sglang#30233", "sgl-project/sglang#33507", "sgl-project/sglang#34208")
async def test_a_prompt_that_one_side_can_never_hold_is_refused_before_any_work(tiny_model: Path) -> None:
    of_role = {"prefill": {"engine.num_pages": "64"}}
    with Deployment(prefill=1, decode=1, of_role=of_role, model=tiny_model) as deployment:
        async with (
            deployment.stub() as stub,
            httpx.AsyncClient(base_url=deployment.routers[0].http, timeout=60) as client,
        ):
            error = await Stream(stub, greedy(prompt_of(93_000, 1025), 8)).failure()
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert "1025" in (error.details() or "")
            assert "1024" in (error.details() or "")
            body = {"prompt": prompt_of(93_000, 1025), "max_tokens": 8}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert "1024" in response.json()["error"]["message"]
            status = await wait_idle(stub, SOON_S)
            assert not any(worker.load.prefill_tokens + worker.load.generated_tokens for worker in status.workers)
            assert len((await Stream(stub, greedy(prompt_of(93_001, 1024), 8)).rest()).token_ids) == 8
