"""The HTTP gateway, called straight or on a real port, for what depends on the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from pageferry.router.gateway.generation import Generator
from pageferry.router.gateway.http import build_app
from pageferry.router.gateway.serving import serve_http


def client_of(
    frontend: Generator, registry: CollectorRegistry | None = None, *, raise_bugs: bool = True, **options: Any
) -> httpx.AsyncClient:
    """Of the gateway, without a port; `options` are of `build_app`."""
    app = build_app(frontend, CollectorRegistry() if registry is None else registry, **options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=raise_bugs)
    return httpx.AsyncClient(transport=transport, base_url="http://pageferry")


@asynccontextmanager
async def serving(frontend: Generator, **options: Any) -> AsyncIterator[str]:
    """Yields its URL; `options` are of `build_app`."""
    stop = asyncio.Event()
    bound = asyncio.get_running_loop().create_future()
    app = build_app(frontend, CollectorRegistry(), **options)
    server = asyncio.create_task(serve_http(app, "127.0.0.1", 0, stop, grace_s=1, on_bound=bound.set_result))
    try:
        yield f"http://127.0.0.1:{await bound}"
    finally:
        stop.set()
        await server
