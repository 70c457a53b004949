"""Pages through shared memory, where it is full, or where one end dies with some in it."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cluster import Stub, generate, greedy, wait_idle
from moments import SOON_S, at_rest, catch
from services import Deployment
from streams import Golden, prompt_of
from traces import SPLIT_SPANS, one, wait_trace

# Runs what follows with a /dev/shm of its own, which has no room for a region.
FULL = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"')
SHARED = {"handoff.transport": "auto"}


async def transport(stub: Stub, trace_id: str) -> str:
    spans = await wait_trace(stub, trace_id, SPLIT_SPANS, timeout_s=SOON_S)
    return str(one(spans, "kv.push", "CLIENT").attributes["pageferry.handoff.transport"])


@pytest.mark.skipif(subprocess.run([*FULL, "true"], check=False).returncode != 0, reason="mounts need privileges")
async def test_where_shared_memory_is_full_pages_come_inline(tiny_model: Path, golden: Golden) -> None:
    deployment = Deployment(prefill=1, decode=1, settings=SHARED, model=tiny_model)
    deployment.decode[0].command_prefix = FULL
    with deployment:
        async with deployment.stub() as stub:
            for number in range(3):
                request = greedy(prompt_of(98_000 + number, 100), 20)
                answer = await generate(stub, request)
                assert answer.token_ids == (await golden(request)).token_ids
                assert answer.started is not None
                assert await transport(stub, answer.started.trace_id) == "inline"
            await wait_idle(stub, SOON_S)


@pytest.fixture(scope="module")
def sharing(tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(prefill=2, decode=2, settings=SHARED, model=tiny_model, linked=True) as deployment:
        yield deployment


@pytest.fixture
async def sharing_stub(sharing: Deployment) -> AsyncIterator[Stub]:
    async with sharing.lent() as stub:
        yield stub


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_an_end_dies_with_pages_in_shared_memory(
    sharing: Deployment, sharing_stub: Stub, golden: Golden, victim: str
) -> None:
    first = await generate(sharing_stub, greedy(prompt_of(98_100, 100), 2))
    assert first.started is not None
    assert await transport(sharing_stub, first.started.trace_id) == "shm"
    caught = await catch(sharing, sharing_stub, "prefilling", number=98 + (victim == "decode"))
    caught.service(victim).kill()
    if victim == "decode":
        caught.prefill.resume()
    async with asyncio.timeout(SOON_S):
        answer = await caught.stream.rest()
    assert answer.token_ids == (await golden(caught.request)).token_ids
    await at_rest(sharing_stub, [worker for worker in sharing.workers if worker.is_alive], sharing)
