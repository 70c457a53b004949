"""Connections that idle, stay for ever, or are used where they should not be."""

import asyncio
import contextlib
import http.client
import subprocess
import sys
import textwrap
import time
from typing import Any

import grpc
import pytest
from cluster import Stub, environment, generate, greedy, wait_idle
from loopback import loopback
from moments import SOON_S
from opentelemetry.trace import NoOpTracer
from services import Deployment
from streams import prompt_of

from pageferry.runtime import channels, server
from pageferry.v1 import decode_pb2, decode_pb2_grpc

SCALE = 100  # the pings of minutes within seconds


@pytest.mark.field("llm-d/llm-d-kv-cache#359", "grpc/grpc-go#5063")
async def test_pings_of_idle_and_of_silent_connections_are_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all intervals a hundredth of what they are, so that minutes pass in seconds."""
    options = tuple((name, value // SCALE if "time" in name else value) for name, value in channels.CHANNEL_OPTIONS)
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", options)
    monkeypatch.setattr(server, "KEEPALIVE_OPTIONS", options)
    monkeypatch.setattr(server, "MIN_PING_INTERVAL_MS", channels.MIN_PING_INTERVAL_MS // SCALE)
    go_on = asyncio.Event()

    async def silent(request: Any, context: Any) -> Any:
        await go_on.wait()
        yield decode_pb2.DecodeResponse()

    async with loopback(NoOpTracer(), decode=silent) as (_, channel):
        await channel.channel_ready()
        left = asyncio.create_task(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        await asyncio.sleep(3.6)  # the six minutes of an idle channel
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest())
        await asyncio.sleep(1.8)  # the three of a stream without a token
        go_on.set()
        assert [message async for message in call] == [decode_pb2.DecodeResponse()]
        assert not left.done(), "the connection was given up, and made again"
        left.cancel()


@pytest.mark.slow
@pytest.mark.field("dapr/dapr#1444", "knative/serving#14011", "kedacore/keda#5224")
async def test_one_channel_reaches_all_replicas_and_one_that_is_added(linked: Deployment, stub: Stub) -> None:
    async def shares(first: int) -> list[int]:
        """Tokens that each decode worker generates of a hundred short calls."""
        before = (await wait_idle(stub, SOON_S)).workers
        slots = asyncio.Semaphore(4)

        async def ask(number: int) -> None:
            async with slots:
                await generate(stub, greedy(prompt_of(first + number, 20), 6))

        await asyncio.gather(*(ask(number) for number in range(100)))
        after = (await wait_idle(stub, SOON_S)).workers
        grown = [new.load.generated_tokens - old.load.generated_tokens for old, new in zip(before, after, strict=True)]
        return [tokens for tokens, worker in zip(grown, after, strict=True) if worker.role == "decode"]

    both = await shares(96_000)
    assert 0.4 * sum(both) <= min(both), both
    linked.decode[1].kill()
    for number in range(5):
        await generate(stub, greedy(prompt_of(96_100 + number, 20), 6))
    linked.decode[1].start()
    linked.decode[1].wait_ready()
    added = await shares(96_200)
    assert 0.4 * sum(added) <= min(added), added


def run_python(code: str, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False)


TWO_LOOPS = """
    import asyncio, sys, threading
    from pageferry.client import Client

    async def ask():
        async with Client(sys.argv[1]) as client:
            for _ in range(500):
                assert await client.models()
        print("done")

    threads = [threading.Thread(target=asyncio.run, args=(ask(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.field("grpc/grpc#42357", "grpc/grpc#25364")
async def test_two_loops_of_one_process_call_without_noise(linked: Deployment, stub: Stub) -> None:
    result = await asyncio.to_thread(run_python, TWO_LOOPS, linked.routers[0].address)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\ndone\n", "")


FORK = """
    import asyncio, os, sys
    from pageferry.client import Client, SyncClient
    from pageferry.core.errors import PageferryError

    async def ask():
        async with Client(sys.argv[1]) as client:
            return await client.models()

    def told(call):
        try:
            call()
        except PageferryError as error:
            print(error.reason)

    child = 0
    with SyncClient(sys.argv[1]) as client:
        assert client.models()
        child = os.fork()
        if not child:
            told(client.models)
            told(lambda: SyncClient(sys.argv[1]))
            told(lambda: asyncio.run(ask()))
        else:
            assert os.waitpid(child, 0)[1] == 0
            assert client.models()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.field("grpc/grpc#13873", "grpc/grpc#12455")
async def test_a_client_that_was_forked_refuses_and_does_not_hang(linked: Deployment, stub: Stub) -> None:
    result = await asyncio.to_thread(run_python, FORK, linked.routers[0].address)
    assert (result.returncode, result.stdout) == (0, "FORKED\n" * 3), result.stderr


@pytest.mark.slow
@pytest.mark.field("llm-d/llm-d#1686")
@pytest.mark.timeout(180)
def test_an_http_connection_that_idled_is_good_to_use(linked: Deployment) -> None:
    """As long as clients' pools keep one, and a little."""
    host, _, port = linked.routers[0].http.removeprefix("http://").rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.connect()
        connection.auto_open = 0  # another connection would be an error
        for pause_s in (0, 95):
            time.sleep(pause_s)
            connection.request("GET", "/health")
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b'{"status":"ready"}')
