"""Clients that read slowly or not at all: each stalls its own stream, and what is kept for it is bounded."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import asking
import gateway
import grpc
import httpx
import pytest
from answer import Answer
from fake_workers import Rig, Script, eventually

from pageferry.core.config import RouterConfig, ServerConfig
from pageferry.router.service import InferenceServicer
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import types_pb2 as types
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server

NUM_TOKENS = 1500
TOKENS = [100 + index % 100 for index in range(NUM_TOKENS)]
# So that little fits into the buffers of the connections between.
NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
ask = partial(asking.ask, max_tokens=NUM_TOKENS)


@dataclass
class Wordy(Script):
    """Each token is a long message."""

    num_logprobs: int = 40

    def token(self, position: int) -> types.GeneratedToken:
        token = super().token(position)
        ids = range(1000, 1000 + self.num_logprobs)
        token.logprobs.top.extend(types.TokenLogprob(token_id=id_, logprob=-1.5) for id_ in ids)
        return token


@asynccontextmanager
async def serving(tiny_model: Path, max_unread_tokens: int, num_logprobs: int = 40) -> AsyncIterator[tuple[Rig, str]]:
    config = RouterConfig(local_prefill_tokens=0, max_unread_tokens=max_unread_tokens)
    async with Rig(str(tiny_model), Wordy(TOKENS, num_logprobs=num_logprobs), router=config) as router:
        router.decode.snapshot.max_num_seqs = 100
        async with GrpcServer(ServerConfig(), router.log.tracer()) as server:
            server.add(add_InferenceServiceServicer_to_server, InferenceServicer(router.frontend), "x")
            yield router, f"127.0.0.1:{await server.start()}"


@pytest.mark.field("grpc/grpc#37715", "grpc/grpc#11966")
async def test_one_that_stops_reading_loses_its_own_request_at_the_limit(tiny_model: Path) -> None:
    async with serving(tiny_model, max_unread_tokens=500) as (router, address):
        async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
            stub = InferenceServiceStub(channel)
            gate = router.decode.pause_at[1000] = asyncio.Event()  # it is still at work when the limit is passed
            stopped = stub.Generate(ask())
            answer = Answer()
            answer.take(await stopped.read())
            await eventually(lambda: router.decode.num_cancelled == 1)
            gate.set()
            await router.decode.wait_idle()  # its slot and pages are free, although nobody reads
            async with grpc.aio.insecure_channel(address) as other:
                assert len((await Answer().read(InferenceServiceStub(other).Generate(ask()))).token_ids) == NUM_TOKENS
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while (event := await stopped.read()) is not grpc.aio.EOF:
                    answer.take(event)
            error = from_rpc_error(caught.value)
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SLOW_READER")
            assert answer.token_ids == TOKENS[: len(answer.token_ids)]
        await eventually(lambda: router.frontend.get_status().running == 0)
        await router.check_idle()


@pytest.mark.field("grpc/grpc#37715", "grpc/grpc#11966")
async def test_one_that_pauses_gets_all_of_its_answer(tiny_model: Path) -> None:
    async with serving(tiny_model, max_unread_tokens=NUM_TOKENS) as (router, address):
        async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
            call = InferenceServiceStub(channel).Generate(ask())
            answer = Answer()
            answer.take(await call.read())
            await eventually(lambda: len(router.decode.works) == 1)
            await router.decode.wait_idle()  # all is generated
            while (event := await call.read()) is not grpc.aio.EOF:
                answer.take(event)
            assert answer.positions == list(range(NUM_TOKENS))
        await eventually(lambda: router.frontend.get_status().running == 0)
        await router.check_idle()


@asynccontextmanager
async def narrow_stream(url: str, body: dict[str, object]) -> AsyncIterator[asyncio.StreamReader]:
    """A streamed chat over a connection with little room, read up to its body."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    host, _, port = url.removeprefix("http://").partition(":")
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    try:
        await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.close()


@pytest.mark.field("grpc/grpc#37715", "grpc/grpc#11966")
async def test_one_that_stops_reading_over_http_loses_its_own_request_at_the_limit(tiny_model: Path) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "stream": True, "logprobs": True, "top_logprobs": 20}
    async with (
        serving(tiny_model, max_unread_tokens=100, num_logprobs=400) as (router, _),
        gateway.serving(router.frontend) as url,
        asyncio.timeout(60),
    ):
        gate = router.decode.pause_at[1000] = asyncio.Event()  # it is still at work when the limit is passed
        async with narrow_stream(url, body) as stopped:
            while router.decode.num_cancelled == 0:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0)
            gate.set()
            await router.decode.wait_idle()  # its slot and pages are free, although nobody reads
            async with httpx.AsyncClient(base_url=url, timeout=60) as other:
                answer = await other.post("/v1/completions", json={"prompt": [200] * 40, "max_tokens": 20})
            assert answer.json()["usage"]["completion_tokens"] == 20
            rest = b""
            while part := await stopped.read(2**16):
                rest = rest[-2000:] + part
        assert b"slow_reader" in rest[-2000:]
        assert b"[DONE]" not in rest
        await eventually(lambda: router.frontend.get_status().running == 0)
        await router.check_idle()
