"""The HTTP gateway on a real port, for what depends on the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from pageferry.router.gateway.generation import Generator
from pageferry.router.gateway.http import build_app
from pageferry.router.gateway.serving import serve_http


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
