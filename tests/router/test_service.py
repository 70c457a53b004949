"""The router behind its gRPC server: statuses, traces of several callers, text, and health."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import asking
import grpc
import pytest
from answer import Answer
from fake_workers import Rig, Script
from spans import assert_one_tree

from pageferry.core.config import RouterConfig, ServerConfig
from pageferry.router.service import InferenceServicer
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server

TOKENS = [4 + byte for byte in b"streamed text"]
ask = partial(asking.ask, prompt="Say something.", max_tokens=len(TOKENS))


@asynccontextmanager
async def serving(tiny_model: Path, **options: object) -> AsyncIterator[tuple[Rig, InferenceServiceStub]]:
    async with Rig(str(tiny_model), Script(TOKENS), **options) as router:
        config = ServerConfig(max_message_bytes=16 * 2**20)
        async with GrpcServer(config, router.log.tracer()) as server:
            server.add(add_InferenceServiceServicer_to_server, InferenceServicer(router.frontend), "x")
            address = f"127.0.0.1:{await server.start()}"
            async with grpc.aio.insecure_channel(address) as channel:
                yield router, InferenceServiceStub(channel)


async def test_generate_streams_text(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        answer = await Answer().read(stub.Generate(ask()))
        assert answer.text == "streamed text"
        assert answer.started.model == "tiny"
        assert len(answer.started.trace_id) == 32
        assert answer.finished.timings.ttft_ms <= answer.finished.timings.total_ms
        await router.check_idle()


@pytest.mark.field("llm-d/llm-d-router#1155", "laike9m/Cyberbrain#39")
async def test_errors_come_with_details(tiny_model: Path) -> None:
    async with serving(tiny_model) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Answer().read(stub.Generate(ask(prompt="x" * (5 * 2**20))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value)
        assert (error.message, error.violations[0].field) == ("prompt is 5242880 bytes, the limit is 1048576", "prompt")


async def test_each_request_is_its_callers_trace_or_its_own(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        parents = {f"{i:032x}": f"{i:016x}" for i in range(1, 10)}
        calls = [
            stub.Generate(
                ask(request_id=trace_id), metadata=(("traceparent", f"00-{trace_id}-{parents[trace_id]}-01"),)
            )
            for trace_id in parents
        ]
        calls.append(stub.Generate(ask(request_id="alone")))
        answers = await asyncio.gather(*(Answer().read(call) for call in calls))
        await router.check_idle()
        spans = await router.log.wait(7 * len(calls))
        for answer in answers:
            own = [span for span in spans if f"{span.context.trace_id:032x}" == answer.started.trace_id]
            parent = int(parents.get(answer.started.request_id, "0"), 16)
            root = assert_one_tree(own, remote_parent=parent)
            assert root.attributes["pageferry.request_id"] == answer.started.request_id
            assert len(own) == 7
            if parent:
                assert answer.started.trace_id == answer.started.request_id
        assert len({answer.started.trace_id for answer in answers}) == len(calls)


async def test_workers_are_told_the_salt_by_grpc(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        for metadata in ((), (("authorization", "Bearer one"),), (("authorization", "Bearer two"),)):
            await Answer().read(stub.Generate(ask(), metadata=metadata))
        for worker in (router.prefill, router.decode):
            salts = [work.cache_salt for work in worker.works]
            assert salts[0] == ""
            assert len(set(salts)) == 3
            assert not any("Bearer" in salt for salt in salts)


@pytest.mark.parametrize("read_first", [True, False])
async def test_a_call_that_is_left_ends_everywhere(tiny_model: Path, read_first: bool) -> None:
    async with serving(tiny_model) as (router, stub):
        router.decode.pause_at = {3: asyncio.Event()}
        call = stub.Generate(ask())
        if read_first:
            for _ in range(4):  # Started and three tokens
                await call.read()
        else:
            await router.prefill.accepted.wait()
        call.cancel()
        await router.check_idle()
        async with asyncio.timeout(60):
            while not (roots := [span for span in router.log.spans if span.name == "pageferry.request"]):
                await router.log.wait(len(router.log.spans) + 1)
        assert [span.attributes["rpc.response.status_code"] for span in roots] == ["CANCELLED"]


@pytest.mark.field("Avarok-Cybersecurity/atlas#482", "tensorflow/serving#1265")
async def test_a_deadline_in_the_queue(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        router.decode.publish(running=8)
        await router.until(lambda: router.fleet.workers[1].view.load.running == 8)
        request_id, call = await queued(stub)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert router.prefill.works == []
        async with asyncio.timeout(60):
            while not (roots := [span for span in router.log.spans if is_root(span, request_id)]):
                await router.log.wait(len(router.log.spans) + 1)
        assert [span.attributes["rpc.response.status_code"] for span in roots] == ["DEADLINE_EXCEEDED"]


async def queued(stub: InferenceServiceStub) -> tuple[str, Any]:
    """A call that got into the queue before its deadline, however busy the machine is; and its id."""
    for timeout_s in (0.1, 1.0, 10.0):
        request_id = f"within {timeout_s} s"
        call = stub.Generate(ask(request_id=request_id), timeout=timeout_s)
        with suppress(grpc.aio.AioRpcError):
            assert (await call.read()).HasField("started")
            return request_id, call
    raise AssertionError("no call got into the queue")


def is_root(span: Any, request_id: str) -> bool:
    return span.name == "pageferry.request" and span.attributes["pageferry.request_id"] == request_id


@pytest.mark.parametrize(("skip_special", "text"), [(None, "ab"), (True, "ab"), (False, "<|im_start|>ab<|im_end|>")])
async def test_special_tokens_in_the_text(tiny_model: Path, skip_special: bool | None, text: str) -> None:
    async with serving(tiny_model) as (router, stub):
        script = Script([1, 4 + ord("a"), 4 + ord("b"), 2])
        router.prefill.script = router.decode.script = script
        fields = {} if skip_special is None else {"skip_special_tokens": skip_special}
        answer = await Answer().read(stub.Generate(ask(**fields)))
        assert answer.text == text
        assert answer.finished.reason == types.FINISH_REASON_STOP


async def test_tokenize_models_and_status(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        response = await stub.Tokenize(pb.TokenizeRequest(text="in 12"))
        assert list(response.ids) == router.tokenizer.encode("in 12")
        assert "".join(response.pieces) == "in 12"
        assert (await stub.ListModels(pb.ListModelsRequest())).models[0].ready
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert [worker.state for worker in status.workers] == ["ready", "ready"]
        with pytest.raises(grpc.aio.AioRpcError, match="traces go to a collector"):
            await stub.GetTrace(pb.GetTraceRequest())


@pytest.mark.field("llm-d/llm-d-router#895")
async def test_a_compressed_request_is_read(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        text = "Say something. " * 100
        answer = await Answer().read(stub.Generate(ask(prompt=text), compression=grpc.Compression.Gzip))
        assert answer.text == "streamed text"
        assert len(router.prefill.works[0].prompt_ids) == len(router.tokenizer.encode(text))


@pytest.mark.field("llm-d/llm-d-router#895", "llm-d/llm-d-router#1155")
async def test_a_request_that_is_small_only_while_compressed_is_refused_by_its_size(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Answer().read(stub.Generate(ask(prompt="a" * 17 * 2**20), compression=grpc.Compression.Gzip))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert router.prefill.works == []


@pytest.mark.field("vllm-project/vllm#18826", "vllm-project/vllm#49330")
async def test_a_thousand_calls_at_a_queue_of_a_hundred(tiny_model: Path) -> None:
    async def refused(call: AsyncIterator[pb.GenerateResponse]) -> bool:
        try:
            await Answer().read(call)
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            assert (known.code, known.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert known.retry_after_ms
            return True
        return False

    async with serving(tiny_model, router=RouterConfig(max_queue=100, local_prefill_tokens=0)) as (router, stub):
        router.decode.publish(running=8)
        await router.until(lambda: router.fleet.workers[1].view.load.running == 8)
        calls = [asyncio.create_task(refused(stub.Generate(ask()))) for _ in range(1000)]
        async with asyncio.timeout(110):
            while sum(call.done() for call in calls) < 900:
                await asyncio.wait(calls, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        assert router.frontend.get_status().queued == 100
        assert router.prefill.works == []
        router.decode.publish(running=0)
        assert sorted(await asyncio.gather(*calls)) == [False] * 100 + [True] * 900
        await router.check_idle()
