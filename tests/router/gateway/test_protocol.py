"""Connections that break HTTP or never get to the point: cut off, without a word in the log, and nobody else minds."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fake_frontend as fake
import httpx
import pytest
import uvloop
from fake_frontend import FakeFrontend
from gateway import serving

from pageferry.router.gateway import bodies, protocol

BODY = b'{"prompt":"a","stream":true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BAD_CHUNK = b"host: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def check_unharmed(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert [record.message for record in caplog.records] == []


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n" + BAD_CHUNK,
        b"GET /nowhere HTTP/1.1\r\n" + BAD_CHUNK,
        b"POST /v1/completions HTTP/1.1\r\n" + BAD_CHUNK,
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + BAD_CHUNK,
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        WHOLE + b"\x00rubbish\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_its_400_and_the_end(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeFrontend()) as url:
        async with connected(url) as (reader, writer):
            writer.write(sent)
            assert b"400 Bad Request" in await asyncio.wait_for(reader.read(), 60)
        await check_unharmed(url, caplog)


def test_what_came_while_the_process_stood_still_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop that services run, which looks at its timers after callbacks, and only then at connections again."""
    monkeypatch.setattr(protocol, "HEADER_S", 2.0)

    async def answer_after_a_pause() -> bytes:
        loop = asyncio.get_running_loop()
        bell, ringer = socket.socketpair()
        async with serving(FakeFrontend()) as url:
            with bell, ringer, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as late:

                def send_and_stand_still() -> None:
                    loop.remove_reader(bell)
                    late.sendall(HEALTH)
                    time.sleep(2.1)

                async with connected(url) as (reader, writer):
                    writer.write(HEALTH)
                    await asyncio.wait_for(reader.readuntil(b'"ready"}'), 60)  # so both have been accepted
                loop.add_reader(bell, send_and_stand_still)
                ringer.send(b"x")
                late.setblocking(False)
                return await asyncio.wait_for(loop.sock_recv(late, 4096), 60)

    assert b'"ready"}' in uvloop.run(answer_after_a_pause())


async def test_a_body_that_breaks_after_the_answer_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeFrontend()) as url:
        async with connected(url) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b'"ready"}'), 60)
            writer.write(b"zz\r\n")
            assert await asyncio.wait_for(reader.read(), 60) == b""
        await check_unharmed(url, caplog)


@pytest.mark.parametrize(
    ("before", "sent"),  # an idle connection is kept longer
    [(b"", b""), (b"", b"G"), (b"", HEALTH[:-4]), (HEALTH, b"G"), (HEALTH, HEALTH[:-4])],
)
async def test_who_never_gets_to_the_point_is_cut_off(
    before: bytes, sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "HEADER_S", 0.3)
    async with serving(FakeFrontend()) as url:
        async with connected(url) as (reader, writer):
            if before:
                writer.write(before)
                await asyncio.wait_for(reader.readuntil(b'"ready"}'), 60)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 60) == b""
        monkeypatch.undo()
        await check_unharmed(url, caplog)


async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.05)
    async with serving(FakeFrontend()) as url, connected(url) as (reader, writer):
        writer.write(WHOLE[:-1])
        assert b"408 Request Timeout" in await asyncio.wait_for(reader.read(), 60)


async def test_a_long_answer_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_S", 0.5)
    gate = asyncio.Event()
    frontend = FakeFrontend((*fake.HELLO[:2], gate, *fake.HELLO[2:]))
    async with serving(frontend) as url, connected(url) as (reader, writer):
        writer.write(WHOLE)
        await asyncio.wait_for(frontend.waiting.wait(), 60)
        asyncio.get_running_loop().call_later(0.8, gate.set)
        assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
