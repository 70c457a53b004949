"""An OpenAI-compatible server in this process that answers with a script of bytes, and refuses fields if told to."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Step = bytes | asyncio.Event | None  # None breaks the connection off


def event(text: str | None = None, *, finish: str | None = None, **fields: Any) -> bytes:
    """One server-sent event of a completion; without a text, only with the fields."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def chat_event(delta: dict[str, Any], *, finish: str | None = None) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"
    )


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return event(usage={"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details})


DONE = b"data: [DONE]\n\n"


class FakeOpenAi:
    """`script` is played to every request after the probe; an event in it is waited for."""

    def __init__(self, script: Collection[Step], refused: Collection[str], status: int) -> None:
        self.script, self.refused, self.status = script, refused, status
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_connections = 0
        self._seen: set[object] = set()
        self._asked = asyncio.Condition()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.transport not in self._seen:
            self._seen.add(request.transport)
            self.num_connections += 1
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        async with self._asked:
            self._asked.notify_all()
        if found := [name for name in body if name in self.refused]:
            return web.json_response({"error": {"message": f"Unrecognized argument: {found[0]}"}}, status=400)
        if self.status != 200:
            return web.json_response({"error": {"message": "out of order"}}, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for step in self.script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step is None:
                assert request.transport is not None
                request.transport.abort()
            else:
                await response.write(step)
        return response

    async def until_asked(self, times: int) -> None:
        async with self._asked:
            await asyncio.wait_for(self._asked.wait_for(lambda: len(self.bodies) >= times), 60)


@asynccontextmanager
async def serving(
    *script: Step, refused: Collection[str] = (), status: int = 200
) -> AsyncIterator[tuple[str, FakeOpenAi]]:
    """Base URL and server."""
    server = FakeOpenAi(script, refused, status)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    for path in ("completions", "chat/completions"):
        app.router.add_post(f"/v1/{path}", server.complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}/v1", server
    finally:
        await runner.cleanup()
