"""What traces show of requests that end badly, that nobody feels a trace, and who is traced at all."""

import asyncio
import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cluster import Stub, generate, greedy, wait_idle
from collectors import AWAY
from google.protobuf.wrappers_pb2 import StringValue
from loopback import ask_stub, loopback
from moments import ENDLESS, LONG_PROMPT, MOMENTS, SOON_S, all_told, catch, num_shipped, until
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import NoOpTracer, Tracer
from pushes import truncate
from service import Role
from services import Deployment
from spans import SpanLog
from streams import Stream, prompt_of, request_span
from traces import DECODE_RPC, PREFILL_RPC, SPLIT_SPANS, Span, spans_of, wait_trace

from pageferry.oip import open_inference_pb2 as oip
from pageferry.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from pageferry.runtime.channels import open_channel
from pageferry.v1 import decode_pb2, decode_pb2_grpc, inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

GENERATE, INFER = "pageferry.v1.InferenceService/Generate", "inference.GRPCInferenceService/ModelInfer"
LIVE_SPANS = Counter({("pageferry.request", "SERVER"): 1, (DECODE_RPC, "CLIENT"): 1, (DECODE_RPC, "SERVER"): 1})
STATUS = "rpc.response.status_code"


def traceparent(number: int, flags: str) -> str:
    return f"00-{number:032x}-00000000000000ab-{flags}"


async def until_decoding(stub: Stub) -> None:
    """Until a decode worker runs something."""

    async def is_running() -> bool:
        status = await stub.GetStatus(pb.GetStatusRequest())
        return any(worker.load.running for worker in status.workers if worker.role == "decode")

    await poll(is_running)


async def poll(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await reached():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


@pytest.fixture
async def calls(linked: Deployment, stub: Stub) -> AsyncIterator[tuple[grpc.aio.Channel, SpanLog]]:
    """A client's own channel to the router, and the client's spans."""
    log = SpanLog()
    async with open_channel(linked.address_of(linked.routers[0]), log.tracer()) as channel:
        yield channel, log


@pytest.mark.field("DataDog/dd-trace-py#19600", "openzipkin/brave#1340")
@pytest.mark.parametrize("how", ["cancelled at token 3", "dropped unread", "unary call cancelled"])
async def test_every_hop_of_a_call_that_is_left_ends_its_span_once(
    calls: tuple[grpc.aio.Channel, SpanLog], stub: Stub, how: str
) -> None:
    channel, log = calls
    request = greedy(prompt_of(501_000 + len(how), 40), 3000)
    if how == "cancelled at token 3":
        stream = await Stream(InferenceServiceStub(channel), request).until(3)
        stream.cancel()
    elif how == "dropped unread":
        call: Any = InferenceServiceStub(channel).Generate(request)
        await until_decoding(stub)
        del call
        gc.collect()
    else:
        calling = asyncio.ensure_future(GRPCInferenceServiceStub(channel).ModelInfer(infer_request()))
        await until_decoding(stub)
        calling.cancel()
    (client,) = await log.wait(1)
    spans = await ended_spans(stub, client, LIVE_SPANS)
    assert attributes_of(client) == {STATUS: "CANCELLED", "rpc.method": INFER if how[0] == "u" else GENERATE}
    for name, kind in LIVE_SPANS:
        assert [span.attributes[STATUS] for span in named(spans, name, kind)] == ["CANCELLED"]
    assert max(Counter(span.span_id for span in spans).values()) == 1
    assert len(log.spans) == 1


def infer_request() -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="tiny")
    request.parameters["sampling_parameters"].string_param = '{"max_tokens": 3000, "ignore_eos": true}'
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Say it.")
    return request


async def ended_spans(stub: Stub, client: ReadableSpan, wanted: Counter[tuple[str, str]]) -> list[Span]:
    """Of the client's trace, when nothing more can come of it."""
    assert client.context is not None
    trace_id = f"{client.context.trace_id:032x}"
    await wait_trace(stub, trace_id, wanted, timeout_s=SOON_S)
    await wait_idle(stub, SOON_S)
    return spans_of((await stub.GetTrace(pb.GetTraceRequest(id=trace_id))).traces_data)


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return {key: (span.attributes or {}).get(key) for key in (STATUS, "rpc.method")}


def named(spans: list[Span], name: str, kind: str) -> list[Span]:
    return [span for span in spans if (span.name, span.kind) == (name, kind)]


@pytest.mark.field("vllm-project/vllm#32162")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_request_that_is_aborted_has_a_span_all_the_same(linked: Deployment, stub: Stub, moment: str) -> None:
    caught = await catch(linked, stub, moment, number=511 + MOMENTS.index(moment), num_tokens=ENDLESS)
    caught.stream.cancel()
    caught.prefill.resume()
    caught.gate.set()
    span = await request_span(stub, caught.stream.trace_id)
    assert span.attributes[STATUS] == "CANCELLED"
    assert span.attributes["gen_ai.usage.input_tokens"] == (LONG_PROMPT if moment == "prefilling" else 100)
    assert span.attributes["gen_ai.usage.output_tokens"] >= {"prefilling": 0, "drawn": 1, "decoding": 10}[moment]
    assert ("pageferry.ttft.prefill_ms" in span.attributes) == (moment != "prefilling")


async def test_a_caller_who_wants_no_trace_leaves_no_span_at_any_hop(linked: Deployment, stub: Stub) -> None:
    numbers = itertools.count(0x5217)

    async def ask(flags: str) -> str:
        number = next(numbers)
        request = greedy(prompt_of(521_000 + number, 100), 20)
        answer = await generate(stub, request, traceparent=traceparent(number, flags))
        assert answer.started is not None
        assert answer.started.traceparent.startswith(f"00-{number:032x}-")
        assert answer.started.traceparent.endswith(flags)
        return answer.started.trace_id

    async def ask_over_http(number: int) -> str:
        async with httpx.AsyncClient(base_url=linked.routers[0].http, timeout=60) as client:
            body = {"prompt": prompt_of(521_000 + number, 100), "max_tokens": 20, "ignore_eos": True}
            headers = {"traceparent": traceparent(number, "00")}
            given = (await client.post("/v1/completions", json=body, headers=headers)).headers["traceparent"]
        assert given.startswith(f"00-{number:032x}-")
        assert given.endswith("-00")
        return f"{number:032x}"

    unsampled = [
        *await asyncio.gather(*(ask("00") for _ in range(8))),
        *await asyncio.gather(*(ask_over_http(next(numbers)) for _ in range(4))),
    ]
    idle = {linked.address_of(worker) for worker in linked.workers}
    while idle:  # until each has sent a later request's spans
        for trace_id in await asyncio.gather(*(ask("01") for _ in range(8))):
            spans = await wait_trace(stub, trace_id, SPLIT_SPANS, timeout_s=SOON_S)
            (route,) = named(spans, "route", "INTERNAL")
            idle -= {route.attributes[f"pageferry.route.{role}"] for role in ("prefill", "decode")}
    for trace_id in unsampled:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrace(pb.GetTraceRequest(id=trace_id))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_spans_of_workers_outlast_a_router_that_starts_again(linked: Deployment) -> None:
    linked.routers[0].kill()  # which workers send their spans to
    async with linked.stub(router=1) as other:
        answer = await generate(other, greedy(prompt_of(531_000, 100), 5))
    linked.restore()
    assert answer.started is not None
    of_workers = Counter(
        {key: 1 for key in SPLIT_SPANS if key[0] not in ("pageferry.request", "queue", "route")}
    ) - Counter({(PREFILL_RPC, "CLIENT"): 1, (DECODE_RPC, "CLIENT"): 1})
    async with linked.stub() as stub:

        async def have_come() -> Counter[tuple[str, str]]:
            try:
                data = await stub.GetTrace(pb.GetTraceRequest(id=answer.started.trace_id))  # type: ignore[union-attr]
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND
                return Counter()
            return Counter((span.name, span.kind) for span in spans_of(data.traces_data))

        async def are_all_there() -> bool:
            return not of_workers - await have_come()

        await poll(are_all_there)
        assert await have_come() - of_workers <= Counter({("prefill.chunk", "INTERNAL"): 1})


async def outcomes(linked: Deployment, stub: Stub, number: int, flags: str) -> dict[str, Any]:
    """What callers see of requests that are left, fail or are refused, all of them traced or none."""
    numbers = itertools.count(number)

    def begin(num_tokens: int, max_tokens: int) -> Stream:
        own = next(numbers)
        return Stream(stub, greedy(prompt_of(own, num_tokens), max_tokens), traceparent=traceparent(own, flags))

    seen: dict[str, Any] = {}
    before = await idle_load(stub)
    left = await begin(32, ENDLESS).until(3)
    left.cancel()
    after = await idle_load(stub)
    seen["left while decoding"] = await ended(left), after["generated"] - before["generated"] < ENDLESS
    for _ in range(10):  # until it is left before its first token
        shipped = num_shipped(linked)
        long = await begin(LONG_PROMPT, 10).started()
        await until(lambda: num_shipped(linked) > shipped, "a page is shipped")  # noqa: B023 - used in this turn only
        for worker in linked.prefill:
            worker.pause()
        await all_told(stub)
        is_computed = bool(long.num_tokens)
        long.cancel()
        for worker in linked.prefill:
            worker.resume()
        before, after = after, await idle_load(stub)
        if not is_computed:
            break
    seen["left while prefilling"] = await ended(long), after["prefilled"] - before["prefilled"] < LONG_PROMPT
    linked.faults += [truncate(0), truncate(0)]
    fails = begin(100, 20)
    seen["prefill fails twice"] = (await fails.rest()).reason, fails.num_tokens
    seen["refused"] = await ended(begin(40, 0))
    return seen


async def idle_load(stub: Stub) -> dict[str, int]:
    loads = [worker.load for worker in (await wait_idle(stub, SOON_S)).workers]
    return {
        "generated": sum(load.generated_tokens for load in loads),
        "prefilled": sum(load.prefill_tokens for load in loads),
    }


async def ended(stream: Stream) -> object:
    """A call's status, and what came with it."""
    try:
        error = await stream.failure()
    except asyncio.CancelledError:
        return "cancelled"
    return error.code(), error.details(), sorted(error.trailing_metadata() or ())


SAME_EITHER_WAY = (
    "open-telemetry/opentelemetry-python-contrib#2065",
    "open-telemetry/opentelemetry-python-contrib#3271",
)


@pytest.mark.field(*SAME_EITHER_WAY)
async def test_callers_see_the_same_with_and_without_a_trace(linked: Deployment, stub: Stub) -> None:
    traced = await outcomes(linked, stub, 541_000, "01")
    assert traced == await outcomes(linked, stub, 542_000, "00")
    assert traced["left while decoding"] == traced["left while prefilling"] == ("cancelled", True)
    assert traced["prefill fails twice"] == ("length", 20)
    assert traced["refused"][0] is grpc.StatusCode.INVALID_ARGUMENT
    statuses = []
    for number in (541_000, 541_001):
        span = await request_span(stub, f"{number:032x}")
        statuses.append(span.attributes[STATUS])
    assert statuses == ["CANCELLED", "CANCELLED"]


@pytest.mark.field(*SAME_EITHER_WAY)
async def test_an_abort_with_metadata_and_a_cancel_are_the_same_with_and_without_spans() -> None:
    cancelled = asyncio.Event()

    async def refuse(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "wrong", (("retry-after-ms", "500"),))

    async def one_then_refuse(request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield decode_pb2.DecodeResponse()
        await refuse(request, context)

    async def hang(request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield decode_pb2.DecodeResponse()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def seen(tracer: Tracer) -> list[object]:
        found: list[object] = []
        async with loopback(tracer, ask=refuse, decode=one_then_refuse) as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as unary:
                await ask_stub(channel)(StringValue())
            call: Any = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest())
            assert await call.read() == decode_pb2.DecodeResponse()
            with pytest.raises(grpc.aio.AioRpcError) as stream:
                await call.read()
            errors = (unary.value, stream.value)
            found += [(error.code(), error.details(), sorted(error.trailing_metadata() or ())) for error in errors]
        async with loopback(tracer, decode=hang) as (_, channel):
            call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest())
            await call.read()
            reading = asyncio.create_task(call.read())
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            async with asyncio.timeout(SOON_S):
                await cancelled.wait()
            found.append(await call.code())
        return found

    log = SpanLog()
    traced = await seen(log.tracer())
    cancelled.clear()
    assert await seen(NoOpTracer()) == traced
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "wrong", [("retry-after-ms", "500")])
    assert traced == [refusal, refusal, grpc.StatusCode.CANCELLED]
    statuses = Counter(str((span.attributes or {})[STATUS]) for span in await log.wait(6))
    assert statuses == {"INVALID_ARGUMENT": 4, "CANCELLED": 2}


@pytest.fixture
def untraced(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    """No process makes spans."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Deployment(model=tiny_model, linked=True) as deployment:
        yield deployment


@pytest.mark.slow
@pytest.mark.field(*SAME_EITHER_WAY)
async def test_callers_see_the_same_where_nothing_is_ever_traced(
    linked: Deployment, stub: Stub, untraced: Deployment
) -> None:
    async with untraced.lent() as other:
        never = await outcomes(untraced, other, 543_000, "01")
        with pytest.raises(grpc.aio.AioRpcError, match="no finished request's trace"):
            await other.GetTrace(pb.GetTraceRequest())
    assert never == await outcomes(linked, stub, 544_000, "01")


@pytest.mark.field("open-telemetry/opentelemetry-python#4043", "open-telemetry/opentelemetry-python#2284")
async def test_a_collector_that_is_away_costs_no_request_and_delays_no_end(tiny_model: Path) -> None:
    with contextlib.ExitStack() as stack:
        roles: tuple[Role, ...] = ("router", "prefill", "decode")
        urls = dict(zip(roles, (stack.enter_context(away()) for away in AWAY.values()), strict=True))
        of_role = {role: {"telemetry.otlp_endpoint": url} for role, url in urls.items()}
        deployment = stack.enter_context(Deployment(prefill=1, decode=1, model=tiny_model, of_role=of_role))
        async with deployment.stub() as stub:
            for first in range(0, 100, 10):
                requests = (greedy(prompt_of(551_000 + first + index, 40), 4) for index in range(10))
                await asyncio.gather(*(generate(stub, request) for request in requests))
        async with httpx.AsyncClient(timeout=60) as client:
            metrics = (await client.get(f"{deployment.routers[0].http}/metrics")).text
        assert "pageferry_spans_lost_total" in metrics
        for service in deployment.services:
            assert service.terminate() == 0  # test_telemetry.py shows that it did not wait for its collector
            events = service.events()
            seen = Counter(event["event"] for event in events if "span" in event["event"])
            assert seen <= Counter(["span_export_failing", "spans_lost"])
            (lost,) = [event["spans"] for event in events if event["event"] == "spans_lost"]
            # Each once; a prompt takes a prefill worker more than one step where others are before it.
            assert lost == 500 if service.role == "router" else 400 <= lost < 500
