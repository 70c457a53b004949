"""Calls to real workers over gRPC: whatever is asked, each ends with a status that says why, and nothing stays held."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fake_engine import make_work
from fuzzing import messages, mutated, near
from handoff_bench import Bench, target_of
from hypothesis import given, settings, strategies as st
from pages import grouped_layout

from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.convert_work import work_to_proto
from pageferry.v1 import decode_pb2, page_pb2, prefill_pb2, worker_pb2

WORK = work_to_proto(make_work("r", [5, 6, 7, 8, 9], max_tokens=4))
PUSHED = decode_pb2.DecodeRequest(work=WORK, source=decode_pb2.PROMPT_SOURCE_PUSHED)
LOCAL = decode_pb2.DecodeRequest(work=WORK, source=decode_pb2.PROMPT_SOURCE_LOCAL, subscription=b"s" * 16, call=1)
ALONE = prefill_pb2.PrefillRequest(work=WORK)
OPEN = page_pb2.PushRequest(open=page_pb2.Open(ticket=b"t" * 16, layout=layout_to_proto(grouped_layout())))
ENDPOINTS = ["", "x", ":", "127.0.0.1:1", "127.0.0.1:99999", "unix:/nowhere"]
CALLS = {
    "/pageferry.v1.DecodeService/Decode": near(PUSHED) | near(LOCAL) | messages(decode_pb2.DecodeRequest),
    "/pageferry.v1.DecodeService/Subscribe": messages(decode_pb2.SubscribeRequest),
    "/pageferry.v1.PrefillService/Prefill": near(ALONE) | messages(prefill_pb2.PrefillRequest),
    "/pageferry.v1.PageService/Push": near(OPEN) | messages(page_pb2.PushRequest),
    "/pageferry.v1.WorkerService/Watch": messages(worker_pb2.WatchRequest),
    "/pageferry.v1.WorkerService/Nothing": messages(worker_pb2.WatchRequest),
}
# UNKNOWN is what nobody has thought of, INTERNAL our own fault, but for bytes that are no message, and for what gRPC's
# client makes of a message that it could not send since the call was over.
BUGS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
OF_GRPC = ("Exception deserializing request!", "Internal error from Core")
CALL_S = 20.0
NUMBERS = itertools.count()  # of requests: the id of one that has just ended may be live a moment longer


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes, bool]:
    """Method, request, and whether the caller leaves after the first message."""
    path = draw(st.sampled_from(list(CALLS)))
    request: Any = draw(CALLS[path])
    if isinstance(request, prefill_pb2.PrefillRequest) and request.HasField("target"):
        request.target.kv_endpoint = draw(st.sampled_from(ENDPOINTS))  # and no host out there
    data = request.SerializeToString()
    if draw(st.integers(0, 3)) == 0:
        data = draw(mutated(st.just(data)))
    return path, data, draw(st.booleans())


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[asyncio.Runner, Bench]]:
    with asyncio.Runner() as runner:
        bench = Bench()
        runner.run(bench.__aenter__())
        yield runner, bench
        runner.run(bench.__aexit__(None, None, None))


async def idle(bench: Bench) -> None:
    """As `until_idle`, however busy the machine is with other fuzzing."""
    try:
        async with asyncio.timeout(CALL_S):
            while not (await bench.p.is_idle() and await bench.d.is_idle()):  # noqa: ASYNC110 - of other threads
                await asyncio.sleep(0.001)
    except TimeoutError:
        loads = [await side.on_engine(side.step.load) for side in (bench.p, bench.d)]
        raise AssertionError(f"still held: {loads}") from None


async def ask(bench: Bench, path: str, data: bytes, leaves: bool) -> tuple[grpc.StatusCode, str]:
    channel = bench.p_channel if "Prefill" in path else bench.d_channel
    call: Any = channel.stream_stream(path, request_serializer=bytes)([data].__iter__(), timeout=0.5)
    try:
        async with asyncio.timeout(CALL_S):
            async for _ in call:
                if leaves:
                    call.cancel()
            return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED, ""


@settings(max_examples=settings.default.max_examples // 4)
@given(requests=st.lists(calls(), min_size=1, max_size=4))
def test_calls_to_workers(served: tuple[asyncio.Runner, Bench], requests: list[tuple[str, bytes, bool]]) -> None:
    runner, bench = served

    async def run() -> None:
        for status, details in await asyncio.gather(*(ask(bench, *request) for request in requests)):
            assert status not in BUGS or details in OF_GRPC, (status, details)
        await idle(bench)
        result = await bench.generate(f"good-{next(NUMBERS)}", [5, 6, 7, 8, 9], max_tokens=4)
        assert len(result.tokens) == 4
        await idle(bench)

    runner.run(run())


@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data())
def test_hand_offs_to_a_worker_that_waits(served: tuple[asyncio.Runner, Bench], data: st.DataObject) -> None:
    """As above, with a true ticket in what is sent."""
    runner, bench = served

    async def run() -> None:
        name = f"waiting-{next(NUMBERS)}"
        decode = bench.decode(name, [5, 6, 7, 8, 9], max_tokens=4)
        try:
            path, request = data.draw(hand_offs(name, (await anext(aiter(decode))).reserved))
            status, details = await ask(bench, path, request.SerializeToString(), data.draw(st.booleans()))
            assert status not in BUGS or details in OF_GRPC, (status, details)
        finally:
            decode.cancel()
        await idle(bench)

    runner.run(run())


@st.composite
def hand_offs(draw: st.DrawFn, name: str, reserved: decode_pb2.Reserved) -> tuple[str, Any]:
    """Method and request."""
    if draw(st.booleans()):
        opening = page_pb2.Open(ticket=reserved.ticket, request_id=name, layout=reserved.layout)
        return "/pageferry.v1.PageService/Push", draw(near(page_pb2.PushRequest(open=opening)))
    request = draw(near(prefill_pb2.PrefillRequest(work=WORK, target=target_of(reserved))))
    if request.target.kv_endpoint != reserved.kv_endpoint:
        request.target.kv_endpoint = "127.0.0.1:1"
    return "/pageferry.v1.PrefillService/Prefill", request
