"""`pageferry drain` against a server in this process; the command runs in a thread, with an event loop of its own."""

import asyncio
from typing import Any

import pytest
from loopback import loopback
from opentelemetry.trace import NoOpTracer

from pageferry.cli.__main__ import main
from pageferry.v1 import decode_pb2, decode_pb2_grpc


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_it_tells_how_many_calls_are_open_and_returns_when_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    may_end = asyncio.Event()

    async def wait(request: Any, context: Any) -> Any:
        yield decode_pb2.DecodeResponse()
        await may_end.wait()

    async with loopback(NoOpTracer(), decode=wait) as (server, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Decode(decode_pb2.DecodeRequest())
        await call.read()
        draining = asyncio.create_task(run("drain", "--address", f"127.0.0.1:{server.port}"))
        out = ""
        async with asyncio.timeout(60):
            while not out:
                await asyncio.sleep(0.01)
                out += capsys.readouterr().out
        may_end.set()
        assert await draining == 0
        assert (await call.code()).name == "OK"
    lines = (out + capsys.readouterr().out).splitlines()
    assert (lines[0], lines[-1]) == ("open calls: 1", "drained; calls that had to be ended: 0")


async def test_the_grace_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def wait(request: Any, context: Any) -> Any:
        yield decode_pb2.DecodeResponse()
        await asyncio.Event().wait()

    async with loopback(NoOpTracer(), decode=wait) as (server, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Decode(decode_pb2.DecodeRequest())
        await call.read()
        assert await run("drain", "--grace", "0.1", "--address", f"127.0.0.1:{server.port}") == 0
        assert (await call.code()).name == "UNAVAILABLE"
    assert capsys.readouterr().out.splitlines()[-1] == "drained; calls that had to be ended: 1"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--address", "127.0.0.1:1"), "no service answers at 127.0.0.1:1"),
        (("--address", "127.0.0.1:1", "--grace", "-1"), "--grace is -1.0, must be from 0 to 86400 seconds"),
        (("--address", "127.0.0.1:1,127.0.0.1:2"), "must be host:port of one router or worker"),
    ],
)
async def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    assert await run("drain", *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line
