"""OpenAI's `/v1/completions` before OpenVINO GenAI's continuous batching, which has no server of its own on PyPI.

`step()` keeps Python's lock, so the pipeline runs in a process of its own: between steps it takes what has come, and
after each it sends what the step has made, in one message. Runs in the peer's environment, without Pageferry's code.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openvino as ov
import uvloop
from aiohttp import web
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_SETTINGS = ("max_tokens", "min_tokens", "ignore_eos", "temperature", "top_p")


def run_pipeline(connection: Connection, arguments: argparse.Namespace) -> None:
    """Serve until the other end closes: (number, ids, settings) or (number, None) for a cancel come in,
    lists of (number, new ids, whether they are the last) go out.
    """
    pipeline = _pipeline(arguments)
    connection.send("ready")
    running: dict[int, Any] = {}  # handles
    while True:
        while not running or connection.poll():
            try:
                number, ids, settings = connection.recv()
            except EOFError:
                return
            if ids is not None:
                config = _with(pipeline.get_config(), settings)
                running[number] = pipeline.add_request(number, ov.Tensor(np.array([ids])), config)
            elif number in running:
                running[number].cancel()
        if pipeline.has_non_finished_requests():
            pipeline.step()
        if made := _collect(running):
            connection.send(made)


def _collect(running: dict[int, Any]) -> list[tuple[int, list[int], bool]]:
    """What the handles have; those that have ended are taken out."""
    made = []
    for number, handle in list(running.items()):
        ids: list[int] = []
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
        finished = handle.get_status().name != "RUNNING" and not handle.can_read()
        if finished:
            del running[number]
        if ids or finished:
            made.append((number, ids, finished))
    return made


@dataclass(eq=False, slots=True)
class Request:
    number: int
    num_prompt_tokens: int
    made: asyncio.Queue[tuple[list[int], bool]] = field(default_factory=asyncio.Queue)  # as `run_pipeline` sends it


class Pipeline:
    """The other process, as the event loop sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._running: dict[int, Request] = {}
        self._numbers = itertools.count()
        asyncio.get_running_loop().add_reader(connection.fileno(), self._receive)

    def submit(self, ids: list[int], settings: dict[str, Any]) -> Request:
        request = Request(next(self._numbers), len(ids))
        self._running[request.number] = request
        self._connection.send((request.number, ids, settings))
        return request

    def forget(self, request: Request) -> None:
        if self._running.pop(request.number, None):
            self._connection.send((request.number, None, None))

    def _receive(self) -> None:
        for number, ids, finished in self._connection.recv():
            if request := self._running.get(number):
                request.made.put_nowait((ids, finished))
                if finished:
                    del self._running[number]


class Server:
    def __init__(self, name: str, tokenizer: Tokenizer, pipeline: Pipeline) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._pipeline = pipeline

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        ids = self._tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        request = self._pipeline.submit(ids, {name: body[name] for name in _SETTINGS if body.get(name) is not None})
        try:
            if body.get("stream"):
                return await self._stream(http, request, body)
            texts = [text async for text, _ in self._texts(request)]
        finally:
            self._pipeline.forget(request)
        return web.json_response(_chunk(self._name, "".join(texts), "stop"))

    async def _stream(self, http: web.Request, request: Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        count = 0
        async for text, num_tokens in self._texts(request):
            count += num_tokens
            await response.write(b"data: " + json.dumps(_chunk(self._name, text, None)).encode() + b"\n\n")
        end = _chunk(self._name, "", "length" if count == body.get("max_tokens") else "stop")
        if (body.get("stream_options") or {}).get("include_usage"):
            prompt = request.num_prompt_tokens
            end["usage"] = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        await response.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def _texts(self, request: Request) -> AsyncIterator[tuple[str, int]]:
        """Text and how many tokens it is of, as it comes; half a character waits for its other half."""
        decode = DecodeStream(skip_special_tokens=True)
        finished = False
        while not finished:
            ids, finished = await request.made.get()
            if ids:
                yield "".join(decode.step(self._tokenizer, token) or "" for token in ids), len(ids)


def _with(config: GenerationConfig, settings: dict[str, Any]) -> GenerationConfig:
    config.max_new_tokens = settings.get("max_tokens", 16)
    config.min_new_tokens = settings.get("min_tokens", 0)
    config.ignore_eos = settings.get("ignore_eos", False)
    if temperature := settings.get("temperature", 1.0):
        config.do_sample, config.temperature, config.top_p = True, temperature, settings.get("top_p", 1.0)
    return config


def _chunk(name: str, text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return {"id": "cmpl", "object": "text_completion", "model": name, "choices": [choice]}


def _pipeline(arguments: argparse.Namespace) -> ContinuousBatchingPipeline:
    scheduler = SchedulerConfig()
    scheduler.cache_size = arguments.cache_gb
    scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
    scheduler.max_num_seqs = arguments.max_num_seqs
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": arguments.precision,
        "KV_CACHE_PRECISION": arguments.kv_precision,
        "INFERENCE_NUM_THREADS": arguments.threads,
    }
    return ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)


async def _serve(arguments: argparse.Namespace, connection: Connection) -> None:
    server = Server(arguments.name, Tokenizer.from_file(arguments.tokenizer), Pipeline(connection))
    application = web.Application(client_max_size=2**22)
    application.add_routes([web.get("/health", server.health), web.post("/v1/completions", server.completions)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, arguments.host, arguments.port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the converted model")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--kv-precision", default="u8")
    parser.add_argument("--cache-gb", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_pipeline, args=(theirs, arguments), daemon=True)
    process.start()
    theirs.close()
    ours.recv()  # until it is ready; raises EOFError where it has failed
    uvloop.run(_serve(arguments, ours))


if __name__ == "__main__":
    main()
