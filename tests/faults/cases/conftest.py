"""Deployments that the cases share; each case leaves them as it found them, or they are mended after it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from answer import Answer
from cluster import Stub, generate, wait_idle
from services import Deployment
from streams import Golden

from pageferry.v1 import inference_pb2 as pb


@pytest.fixture(scope="session")
def linked(tiny_model: Path) -> Iterator[Deployment]:
    """Two routers, prefill and decode workers, with proxies on every way between them."""
    with Deployment(routers=2, model=tiny_model, linked=True) as deployment:
        yield deployment


@pytest.fixture
async def stub(linked: Deployment) -> AsyncIterator[Stub]:
    """Of the linked deployment. Afterwards every page, ticket and stream is found given back."""
    async with linked.stub() as stub:
        yield stub
    linked.restore()
    async with linked.stub() as stub:
        await wait_idle(stub)


@pytest.fixture(scope="session")
def alone(tiny_model: Path) -> Iterator[Deployment]:
    """One decode worker that does everything itself."""
    with Deployment(prefill=0, decode=1, model=tiny_model) as deployment:
        yield deployment


@pytest.fixture
async def golden(alone: Deployment) -> AsyncIterator[Golden]:
    """What a request gives where nothing is handed over, and nothing goes wrong."""
    async with alone.stub() as stub:

        async def ask(request: pb.GenerateRequest) -> Answer:
            return await generate(stub, request)

        yield ask
