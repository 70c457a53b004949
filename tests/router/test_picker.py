"""The endpoint picker, asked as Envoy asks it, over workers whose load and caches a test sets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from ext_proc import MODE, Gateway, Told, answer_of, body_of, chat, framed, headers_of
from fake_workers import LAYOUT, Rig, Script, eventually

from pageferry.core.config import Config, RouterConfig, SecurityConfig, ServerConfig
from pageferry.core.errors import InvalidArgumentError, PageferryError
from pageferry.core.formats import PageFormat
from pageferry.core.prefix import page_hashes
from pageferry.core.tenants import key_digest
from pageferry.ext_proc import external_processor_pb2 as envoy
from pageferry.ext_proc.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from pageferry.router import picks as picks_module
from pageferry.router.gateway import bodies as bodies_module
from pageferry.router.gateway.bodies import Bodies
from pageferry.router.picker import PICKER_SERVICE, PickerServicer
from pageferry.router.picker_reply import MAX_PIECE_BYTES
from pageferry.router.workers import Role
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

PORT = 8080
LONG = "A long system prompt that fills several pages of tokens. " * 8
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Picking(Rig):
    """Fake workers, the picker over them, and a gateway that asks it."""

    gateway: Gateway
    server: GrpcServer

    async def set_load(self, number: int, **load: Any) -> None:
        """Of a decode worker, known to the router when this returns."""
        self.decodes[number].publish(**load)
        view = next(one.view for one in self.fleet.workers if one.address == self.decodes[number].address)
        name, value = next(iter(load.items()))
        await self.until(lambda: getattr(view.load, name) == value)

    async def cache(self, number: int, text: str, salt: str = "") -> None:
        """Let a decode worker hold the text's pages."""
        admission = self.frontend._admission
        request = pb.GenerateRequest(stop=types.StopConditions(max_tokens=4))
        request.chat.messages.add(role="user", content=text)
        ids = (await admission.admit(request)).prompt_ids
        hashes = page_hashes(ids, LAYOUT.page_size, salt=salt, layout_key=LAYOUT.cache_key)
        assert hashes
        self.decodes[number].hub.publish_cache(hashes, [])
        view = next(one.view for one in self.fleet.workers if one.address == self.decodes[number].address)
        await self.until(lambda: view.num_cached_pages >= len(hashes))


@pytest.fixture
def picking(tiny_model: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(*, num_decode: int = 2, bodies: Bodies | None = None, **options: Any) -> AsyncIterator[Picking]:
        settings = {"picker_wait_s": 5, "local_prefill_tokens": 0, "picker_port": PORT} | options.pop("router", {})
        hosts = [f"127.0.0.{2 + number}" for number in range(num_decode)]
        rig = Picking(
            str(tiny_model),
            Script([100] * 8),
            num_decode=num_decode,
            decode_hosts=hosts,
            router=RouterConfig(**settings),
            **options,
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(rig)
            rig.server = await stack.enter_async_context(GrpcServer(ServerConfig(), rig.log.tracer()))
            picker = PickerServicer(rig.frontend.picks(), bodies or Bodies())
            rig.server.add(add_ExternalProcessorServicer_to_server, picker, PICKER_SERVICE)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{await rig.server.start()}")
            rig.gateway = Gateway(await stack.enter_async_context(channel))
            yield rig

    return make


A, B = f"127.0.0.2:{PORT}", f"127.0.0.3:{PORT}"


async def test_an_idle_pool_gives_an_endpoint_and_fallbacks_in_header_and_metadata(picking: Any) -> None:
    async with picking() as rig:
        told = await rig.gateway.ask(chat())
        assert sorted(told.endpoints) == [A, B]
        assert rig.value("pageferry_picks_total", outcome="picked") == 1


async def test_a_prompt_goes_where_its_pages_are(picking: Any) -> None:
    async with picking() as rig:
        for number, endpoint in enumerate((A, B)):
            text = f"{number} {LONG}"
            await rig.cache(number, text)
            assert (await rig.gateway.ask(chat(text))).endpoints[0] == endpoint


async def test_pages_of_another_caller_do_not_count(picking: Any) -> None:
    async with picking() as rig:
        salt = rig.frontend.check_caller(["Bearer one"]).salt
        await rig.cache(1, LONG, salt)
        assert (await rig.gateway.ask(chat(LONG), authorization="Bearer one")).endpoints[0] == B
        assert (await rig.gateway.ask(chat(LONG), authorization="Bearer two")).endpoints[0] == A


async def test_picks_at_once_spread_before_any_worker_tells_of_them(
    picking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picks_module, "ARRIVAL_S", 60)
    async with picking(num_decode=3) as rig:
        told = [await rig.gateway.ask(chat(str(number))) for number in range(9)]
        firsts = [one.endpoints[0] for one in told]
        assert sorted(map(firsts.count, set(firsts))) == [3, 3, 3]


async def test_the_busier_and_the_fuller_one_come_last(picking: Any) -> None:
    async with picking(num_decode=3) as rig:
        await rig.set_load(0, running=7)
        await rig.set_load(1, pages_free=10)
        assert (await rig.gateway.ask(chat(LONG))).endpoints == [f"127.0.0.4:{PORT}", A]


async def test_the_profiles_pages_decide_who_may_be_picked(picking: Any, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles.toml"
    profiles.write_text('[profiles.exact]\npage_formats = ["fp16"]\n')
    exact = replace(LAYOUT, format=PageFormat.parse("fp16"))
    async with picking(num_prefill=0, decode_layouts=[LAYOUT, exact], router={"profiles_file": str(profiles)}) as rig:
        assert (await rig.gateway.ask(chat(), x_pageferry_profile="exact")).endpoints == [B]
        assert (await rig.gateway.ask(chat())).endpoints == [A, B]


async def test_only_endpoints_that_the_gateway_allows_are_picked(picking: Any) -> None:
    async with picking() as rig:
        await rig.cache(0, LONG)
        assert (await rig.gateway.ask(chat(LONG), subset=[B, "10.0.0.9:8080"])).endpoints == [B]
        for subset in ([], ["10.0.0.9:8080"]):
            told = await rig.gateway.ask(chat(LONG), subset=subset)
            assert (told.status, told.error["code"]) == (503, "no_worker")
            told = await rig.gateway.ask(path="/v1/models", method="GET", subset=subset)
            assert (told.status, told.error["code"]) == (503, "no_worker")
        told = await rig.gateway.ask(chat(max_tokens=1), subset=[])  # which a prefill worker alone could do
        assert told.status == 503


async def test_a_single_token_goes_to_any_router(picking: Any) -> None:
    async with picking() as rig:
        await rig.set_load(0, running=8)
        await rig.set_load(1, running=9)
        assert (await rig.gateway.ask(chat(max_tokens=1))).endpoints == [A, B]


async def test_what_is_no_generation_goes_to_the_least_busy_without_its_body(picking: Any) -> None:
    async with picking() as rig:
        await rig.set_load(0, running=3)
        for head in ({"path": "/v1/models", "method": "GET"}, {"path": "/v1/embeddings"}, {"body_mode": MODE.NONE}):
            call = rig.gateway.open()
            assert (await rig.gateway.ask(call=call, **head)).endpoints == [B, A]
            await call.done_writing()
        call = rig.gateway.open()
        assert (await rig.gateway.ask(b"{", call=call, content_type="text/plain")).endpoints == [B, A]
        await call.write(body_of(b"{"))
        assert (await call.read()).HasField("request_body")
        assert rig.value("pageferry_picks_total", outcome="picked") == 0


async def test_bodies_in_duplex_are_sent_on_whole(picking: Any) -> None:
    async with picking() as rig:
        data = chat(user="x" * 2 * MAX_PIECE_BYTES)  # a field that changes nothing
        for trailers in (False, True):
            call, told = rig.gateway.open(), Told()
            await call.write(headers_of(body_mode=MODE.FULL_DUPLEX_STREAMED))
            for start in range(0, len(data), 40_000):
                is_last = start + 40_000 >= len(data)
                await call.write(body_of(data[start : start + 40_000], end_of_stream=is_last and not trailers))
            if trailers:
                await call.write(envoy.ProcessingRequest(request_trailers=envoy.HttpTrailers()))
            while not told.is_whole:
                reply = await call.read()
                assert len(reply.request_body.response.body_mutation.streamed_response.body) <= 64 * 1024
                told.take(reply)
                if reply.HasField("request_trailers"):
                    break
            assert (sorted(told.endpoints), told.body, told.is_whole) == ([A, B], data, not trailers)
            call.cancel()


async def refused(rig: Picking, body: bytes, **head: Any) -> tuple[int, str, str]:
    told = await rig.gateway.ask(body, **head)
    assert told.error_headers["content-type"] == "application/json"
    return told.status, told.error["code"], told.error["param"]


async def test_what_is_wrong_with_a_request_is_told_in_openais_form(picking: Any) -> None:
    async with picking(bodies=Bodies(2000)) as rig:
        assert await refused(rig, b"{") == (400, "malformed_json", "body")
        assert await refused(rig, chat(temperature=-1)) == (400, "invalid_field", "temperature")
        assert await refused(rig, chat(max_tokens=10**6)) == (400, "too_long", "max_tokens")
        assert await refused(rig, chat(model="other")) == (404, "model_not_found", None)
        assert await refused(rig, chat(profile="none")) == (400, "invalid_field", "profile")
        assert await refused(rig, chat("x" * 2000)) == (413, "body_too_large", None)
        cut = {"body_mode": MODE.BUFFERED_PARTIAL}
        assert (await rig.gateway.ask(chat(), **cut)).endpoints == [A, B]
        for mode in (MODE.STREAMED, 77):
            assert await refused(rig, chat(), body_mode=mode) == (500, "body_mode", None)
        timeout = {"x_envoy_expected_rq_timeout_ms": "soon"}
        assert await refused(rig, chat(), **timeout) == (400, "invalid_field", "x-envoy-expected-rq-timeout-ms")
        assert rig.value("pageferry_picks_total", outcome="invalid_argument") == 3
        assert rig.value("pageferry_picks_total", outcome="not_found") == 1


async def test_without_any_worker_it_is_503_and_without_room_429(picking: Any) -> None:
    async with picking(router={"picker_wait_s": 0.05}) as rig:
        for number in (0, 1):
            await rig.set_load(number, running=8)
        told = await rig.gateway.ask(chat())
        assert (told.status, told.error["code"], told.error["type"]) == (429, "no_room", "rate_limit_error")
        assert told.error_headers["retry-after"] == "1"
        for decode in rig.decodes:
            decode.hub.publish_draining()
        await rig.until(lambda: not rig.fleet.ready(Role.DECODE))
        told = await rig.gateway.ask(chat())
        assert (told.status, told.error["code"], told.error["type"]) == (503, "no_worker", "server_error")
        assert told.error_headers["retry-after"] == "1"
        assert (await rig.gateway.ask(path="/v1/models", method="GET")).status == 503


async def test_it_waits_for_room_in_the_routers_queue(picking: Any) -> None:
    async with picking() as rig:
        for number in (0, 1):
            await rig.set_load(number, running=8)
        asking = asyncio.create_task(rig.gateway.ask(chat()))
        await eventually(lambda: rig.frontend.get_status().queued == 1)
        await rig.set_load(1, running=7)
        assert (await asking).endpoints == [B]


async def test_a_client_that_leaves_while_its_request_waits_leaves_nothing(picking: Any) -> None:
    async with picking() as rig:
        for number in (0, 1):
            await rig.set_load(number, running=8)
        call = rig.gateway.open()
        asking = asyncio.create_task(rig.gateway.ask(chat(), call=call))
        await eventually(lambda: rig.frontend.get_status().queued == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: rig.frontend.get_status().queued == 0)
        assert rig.value("pageferry_picks_total", outcome="cancelled") == 1
        assert not any(worker.view.uncounted for worker in rig.fleet.workers)


async def test_a_body_that_ends_early_is_no_request(picking: Any) -> None:
    async with picking() as rig:
        call = rig.gateway.open()
        await call.write(headers_of(body_mode=MODE.FULL_DUPLEX_STREAMED))
        await call.write(body_of(chat()[:10], end_of_stream=False))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_body_that_does_not_come_is_given_up(picking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "BODY_S", 0.01)
    async with picking() as rig:
        call, told = rig.gateway.open(), Told()
        await call.write(headers_of(body_mode=MODE.FULL_DUPLEX_STREAMED))
        told.take(await call.read())
        assert (told.status, told.error["code"]) == (504, "body_timeout")


async def test_bodies_on_their_way_and_those_that_wait_for_a_choice_are_bounded_together(
    picking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_module, "MAX_BYTES", 1000)
    refusals: list[PageferryError] = []
    bodies = Bodies(on_refused=refusals.append)
    duplex = headers_of(body_mode=MODE.FULL_DUPLEX_STREAMED)
    async with picking(bodies=bodies) as rig:
        for number in (0, 1):
            await rig.set_load(number, running=8)
        for is_whole in (False, True):
            call, told = rig.gateway.open(), Told()
            await call.write(duplex)
            await call.write(body_of(chat(user="x" * 600), end_of_stream=is_whole))
            await eventually(lambda: bodies.num_bytes > 600)
            await eventually(lambda: rig.frontend.get_status().queued == is_whole)  # noqa: B023
            others = rig.gateway.open()
            await others.write(duplex)
            await others.write(body_of(chat(user="x" * 600), end_of_stream=False))
            told.take(await call.read())
            assert (told.status, told.error["code"]) == (503, "bodies_full")
            assert told.error_headers["retry-after"] == "1"
            await others.done_writing()
            assert await others.read() is grpc.aio.EOF
            await eventually(lambda: bodies.num_bytes == 0 and rig.frontend.get_status().queued == 0)
    assert len(refusals) == 2


async def test_it_is_counted_until_its_worker_can_count_it(picking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks_module, "ARRIVAL_S", 60)
    async with picking(num_decode=1) as rig:
        (view,) = [worker.view for worker in rig.fleet.of(Role.DECODE)]
        call = rig.gateway.open()
        await rig.gateway.ask(chat(), call=call)
        await rig.set_load(0, waiting=3)
        assert len(view.uncounted) == 1  # it may still be on its way
        await call.write(answer_of())  # the first word of the answer, which may have ended by now
        assert (await call.read()).HasField("response_headers")
        assert not view.uncounted
        # Of one that nothing more is heard of, as where the gateway skips the answer's headers.
        monkeypatch.setattr(picks_module, "ARRIVAL_S", 0.01)
        call = rig.gateway.open()
        await rig.gateway.ask(chat(), call=call)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await eventually(lambda: not view.uncounted)


@pytest.mark.parametrize("then", ["silent", "half closed", "answered"])
async def test_a_stream_that_never_ends_holds_nothing_of_its_pick(
    picking: Any, then: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(picks_module, "ARRIVAL_S", 60 if then == "answered" else 0.01)
    profiles = tmp_path / "profiles.toml"
    profiles.write_text("[profiles.interactive]\nmax_running = 1\n")
    async with picking(num_decode=1, router={"profiles_file": str(profiles), "picker_wait_s": 60}) as rig:
        calls = []
        for _ in range(3):  # each of which waits until the one before holds its profile no more
            calls.append(call := rig.gateway.open())
            told = await rig.gateway.ask(chat(), call=call, response_body_mode=MODE.FULL_DUPLEX_STREAMED)
            assert told.endpoints == [A]
            if then == "half closed":
                await call.done_writing()
            elif then == "answered":
                await call.write(answer_of(A))
                assert (await call.read()).HasField("response_headers")
        await eventually(lambda: not any(worker.num_granted for worker in rig.fleet.workers))
        assert [status.running for status in rig.frontend.get_status().profiles if status.name == "interactive"] == [0]
        assert not any(worker.view.uncounted for worker in rig.fleet.of(Role.DECODE))
        if then == "silent":  # for as long as the model thinks: it lives on, and is of use
            for number, call in enumerate(calls, 1):
                await call.write(answer_of(A))
                assert (await call.read()).HasField("response_headers")
                assert rig.value("pageferry_picks_served_total", by="first") == number


async def test_who_has_served_is_counted_and_the_stream_ends_with_the_answers_headers(picking: Any) -> None:
    async with picking() as rig:
        for served, by in ((A, "first"), (B, "fallback"), ("10.0.0.9:8080", "other")):
            await rig.cache(0, LONG)
            call = rig.gateway.open()
            assert (await rig.gateway.ask(chat(LONG), call=call)).endpoints == [A, B]
            await call.write(answer_of(served))
            assert (await call.read()).HasField("response_headers")
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            assert rig.value("pageferry_picks_served_total", by=by) == 1


async def test_answers_in_duplex_pass_as_they_are(picking: Any) -> None:
    async with picking() as rig:
        call = rig.gateway.open()
        await rig.gateway.ask(chat(), call=call, response_body_mode=MODE.FULL_DUPLEX_STREAMED)
        await call.write(answer_of())
        assert (await call.read()).HasField("response_headers")
        piece = envoy.HttpBody(body=b"data: 1", end_of_stream=False)
        await call.write(envoy.ProcessingRequest(response_body=piece))
        sent = (await call.read()).response_body.response.body_mutation.streamed_response
        assert (sent.body, sent.end_of_stream) == (b"data: 1", False)
        await call.write(envoy.ProcessingRequest(response_trailers=envoy.HttpTrailers()))
        assert (await call.read()).HasField("response_trailers")


async def test_a_drain_ends_streams_without_a_failure_and_still_answers(picking: Any) -> None:
    async with picking() as rig:
        call = rig.gateway.open()
        await rig.gateway.ask(chat(), call=call)
        await rig.frontend.drain(1)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        call = rig.gateway.open()
        assert len((await rig.gateway.ask(chat(), call=call)).endpoints) == 2
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_the_choice_is_a_span_of_the_callers_trace(picking: Any) -> None:
    async with picking() as rig:
        await rig.cache(1, LONG)
        told = await rig.gateway.ask(chat(LONG), traceparent=TRACEPARENT, x_request_id="r-7")
        assert "traceparent" not in told.headers  # the client's reaches the router beside the worker
        (span,) = await rig.log.wait(1)
        assert span.name == "pageferry.pick"
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        said = dict(span.attributes or {})
        assert said["pageferry.request_id"] == "r-7"
        assert (said["pageferry.pick.endpoint"], said["pageferry.pick.fallbacks"]) == (B, (A,))
        assert said["pageferry.route.decode_cached_tokens"] > said["pageferry.pick.other_cached_tokens"][0] == 0
        assert said["pageferry.route.decode_score"] < said["pageferry.pick.other_scores"][0]
        assert said["pageferry.route.source"] == "pushed"


async def test_a_gateway_that_traces_is_the_parent(picking: Any) -> None:
    async with picking() as rig:
        call = rig.gateway.open(("traceparent", TRACEPARENT))
        await rig.gateway.ask(chat(), call=call, traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
        (span,) = await rig.log.wait(1)
        assert f"{span.context.trace_id:032x}" == TRACE_ID


async def test_without_a_callers_trace_the_request_joins_that_of_the_choice(picking: Any) -> None:
    async with picking() as rig:
        told = await rig.gateway.ask(chat())
        (span,) = await rig.log.wait(1)
        assert told.headers["traceparent"].split("-")[1:3] == [
            f"{span.context.trace_id:032x}",
            f"{span.context.span_id:016x}",
        ]


async def test_tenants_are_known_by_their_keys(picking: Any, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[[tenant]]\nname = "one"\nkey_sha256 = ["{key_digest("k1")}"]\nmin_priority = 5\n')
    config = Config(security=SecurityConfig(tenants_file=str(tenants)))
    async with picking(config=config) as rig:
        told = await rig.gateway.ask(chat())
        assert (told.status, told.error_headers["www-authenticate"]) == (401, "Bearer")
        assert rig.value("pageferry_picks_total", outcome="unauthenticated") == 1
        assert not rig.log.spans
        for mode in (MODE.BUFFERED, MODE.FULL_DUPLEX_STREAMED):  # before a stranger's body has come
            call, told = rig.gateway.open(), Told()
            await call.write(headers_of(body_mode=mode))
            told.take(await call.read())
            assert told.status == 401
        assert rig.value("pageferry_picks_total", outcome="unauthenticated") == 3
        assert (await rig.gateway.ask(chat(), authorization="Bearer k1")).status == 403  # for its priority
        told = await rig.gateway.ask(chat(priority=5), authorization="Bearer k1")
        assert told.endpoints == [A, B]


async def test_generate_of_grpc_is_picked_for_too(picking: Any) -> None:
    async with picking() as rig:
        head = {"path": "/pageferry.v1.InferenceService/Generate", "content_type": "application/grpc+proto"}
        request = pb.GenerateRequest(prompt="hello", stop=types.StopConditions(max_tokens=4))
        assert (await rig.gateway.ask(framed(request), **head)).endpoints == [A, B]
        for wrong in (b"", b"\1" + framed(request)[1:], framed(request)[:-1], framed(request) + b"x"):
            told = await rig.gateway.ask(wrong, **head)
            assert (told.status, told.grpc_status) == (400, grpc.StatusCode.INVALID_ARGUMENT.value[0])
            assert "no single message" in told.text
        assert (await rig.gateway.ask(b"\0\0\0\0\1\xff", **head)).grpc_status == 3
        other = {"path": "/pageferry.v1.InferenceService/ListModels", "content_type": "application/grpc"}
        assert sorted((await rig.gateway.ask(b"", **other)).endpoints) == [A, B]


@pytest.mark.parametrize("first", [body_of(b""), answer_of()])
async def test_a_stream_must_begin_with_headers(picking: Any, first: envoy.ProcessingRequest) -> None:
    async with picking() as rig:
        call = rig.gateway.open()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_who_only_watches_is_not_answered(picking: Any) -> None:
    async with picking() as rig:
        call = rig.gateway.open()
        head = headers_of()
        head.observability_mode = True
        await call.write(head)
        assert await call.read() is grpc.aio.EOF


def test_workers_known_by_name_cannot_be_told_to_gateways() -> None:
    with pytest.raises(InvalidArgumentError, match="decode is 'worker:50051', must have an IP address"):
        RouterConfig(decode=("10.0.0.1:1", "worker:50051"), picker_port=8080)
    assert RouterConfig(decode=("[::1]:50051",), picker_port=8080).picker_port == 8080
