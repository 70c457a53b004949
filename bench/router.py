"""What the router costs, in CPU time of its process, a token and a request, and how many tokens it passes on.

    python bench/router.py [--only NAME ...] [--seconds 8] [--json FILE]

Router, workers and client are processes of their own. The workers are Pageferry's but for the model, which is a clock
that gives all streams a token each step. Every answer is checked: each position once, in order, the right token, one
end. CPU time is user + system, and depends less on what else runs than wall time; rates need a machine of their own.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[1] / "tests" / "support"), str(Path(__file__).parent)])

import grpc
import psutil
from answer import Answer
from cluster import environment
from links import hold_port
from paced_workers import token_at

from pageferry.core.model_files import resolve_model
from pageferry.text.tokenizer import load_tokenizer
from pageferry.v1 import inference_pb2 as pb

MODEL = "smollm2"
READY_S = 120
GENERATE = "/pageferry.v1.InferenceService/Generate"


@dataclass(frozen=True)
class Load:
    """Streams that begin together, of `rate` tokens a second each, and what is wanted of the router."""

    name: str
    streams: int
    rate: float
    tokens: int = 0  # of each request; 0: as many as fill the seconds
    requests: int = 1  # of each stream, one after the other
    prompt_tokens: int = 16
    over_http: bool = False
    prefill: bool = False  # a prefill worker computes the prompts
    most_ms: float | None = None  # of the router's CPU a token
    least_messages: float = 0.0  # a second
    least_tokens: float = 0.0  # a second


LOADS = (
    Load("tokens over gRPC", 32, 50, most_ms=0.15),
    Load("tokens over HTTP", 32, 50, most_ms=0.15, over_http=True),
    Load("many messages", 100, 150, least_messages=10_000),
    Load("more than it can pass on one by one", 100, 400, least_tokens=20_000),
    Load("requests", 8, 1000, tokens=2, requests=30, prefill=True, prompt_tokens=256),
    Load("requests of 4,000 tokens", 4, 1000, tokens=2, requests=30, prefill=True, prompt_tokens=4000),
)


@dataclass(frozen=True)
class Result:
    """Seconds are those of CPU, but for `seconds`."""

    load: Load
    tokens: int
    messages: int  # that carried tokens to clients
    seconds: float
    router_s: float
    workers_s: float
    client_s: float

    @property
    def is_good(self) -> bool:
        load = self.load
        rates = self.messages / self.seconds >= load.least_messages and self.tokens / self.seconds >= load.least_tokens
        return rates and (load.most_ms is None or self.router_s / self.tokens * 1000 <= load.most_ms)

    def __str__(self) -> str:
        costs = (
            f"router {self.router_s / self.tokens * 1000:.3f} ms a token, "
            f"workers {self.workers_s / self.tokens * 1000:.3f}, client {self.client_s / self.tokens * 1000:.3f}"
        )
        if self.load.requests > 1:
            costs = f"router {self.router_s / (self.load.streams * self.load.requests) * 1000:.2f} ms a request"
        rates = f"{self.tokens / self.seconds:.0f} tokens/s in {self.messages / self.seconds:.0f} messages/s"
        return f"{self.load.name}: {rates}; {costs}; {self.router_s / self.seconds:.0%} of a core"


@dataclass
class Cluster:
    grpc_address: str
    http_port: int
    router: psutil.Process
    workers: list[psutil.Process]


@contextlib.contextmanager
def running(load: Load) -> Iterator[Cluster]:
    """A router over paced workers, each a process; killed afterwards."""
    roles = ["decode", *(["prefill"] if load.prefill else [])]
    holders = [hold_port() for _ in range(2 + len(roles))]
    port, http_port, *ports = (holder.getsockname()[1] for holder in holders)
    settings = {
        "engine.model": MODEL,
        "scheduler.max_num_seqs": str(load.streams),
        "telemetry.otlp_endpoint": f"127.0.0.1:{port}",
        "router.local_prefill_tokens": "0" if load.prefill else "8192",
        "telemetry.log_level": "error",
    }
    with contextlib.ExitStack() as stack:
        for holder in holders:
            stack.enter_context(holder)

        def start(*command: str, **own: str) -> psutil.Process:
            variables = environment(settings | {key.replace("__", "."): value for key, value in own.items()})
            process = subprocess.Popen([sys.executable, *command, "--die-with-parent"], env=variables)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return psutil.Process(process.pid)

        script = str(Path(__file__).with_name("paced_workers.py"))
        workers = [
            start(script, role, "--step-ms", str(1000 / load.rate), server__port=str(number))
            for role, number in zip(roles, ports, strict=True)
        ]
        addresses = {f"router__{role}": f"127.0.0.1:{number}" for role, number in zip(roles, ports, strict=True)}
        router = start(
            "-m",
            "pageferry.router",
            server__port=str(port),
            server__http_port=str(http_port),
            **addresses,
            telemetry__otlp_endpoint="",
        )
        yield Cluster(f"127.0.0.1:{port}", http_port, router, workers)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def prompt(number: int, num_tokens: int) -> list[int]:
    return [1000 + number % 40_000, *(1000 + index * 31 % 40_000 for index in range(num_tokens - 1))]


async def grpc_stream(channel: grpc.aio.Channel, number: int, load: Load, num_tokens: int) -> list[bytes]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(number, load.prompt_tokens)))
    request.stop.max_tokens, request.stop.ignore_eos = num_tokens, True
    call = channel.unary_stream(GENERATE)(request.SerializeToString(), wait_for_ready=True)
    messages: list[bytes] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def check_grpc(messages: list[bytes], num_tokens: int) -> int:
    answer = Answer()
    for message in messages:
        answer.take(pb.GenerateResponse.FromString(message))
    assert answer.reason == "length"
    assert answer.token_ids == [token_at(position) for position in range(num_tokens)]
    return len(messages) - 2


async def http_stream(port: int, number: int, load: Load, num_tokens: int) -> bytes:
    """The whole answer as it came, so that no time goes into reading it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": prompt(number, load.prompt_tokens), "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
    parts: list[bytes] = []
    while part := await reader.read(1 << 16):
        parts.append(part)
    writer.close()
    return b"".join(parts)


def check_http(answer: bytes, text: str) -> int:
    events = [json.loads(line[6:]) for line in answer.split(b"\r\n") if line.startswith(b"data: {")]
    assert answer.count(b"data: [DONE]") == 1, answer[:300]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(event["choices"][0]["text"] for event in events) == text
    return len(events) - 1


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    options = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200))
    async with grpc.aio.insecure_channel(cluster.grpc_address, options=options) as channel:
        stub = channel.unary_unary("/pageferry.v1.InferenceService/ListModels")
        while True:
            models = pb.ListModelsResponse.FromString(await stub(b"", wait_for_ready=True, timeout=READY_S))
            if all(model.ready for model in models.models):
                break
            await asyncio.sleep(0.1)
        yield channel


async def measure(load: Load, cluster: Cluster, seconds: float) -> Result:
    num_tokens = load.tokens or round(load.rate * seconds)
    answers: list[list[bytes]] = []
    streams: list[bytes] = []
    async with connected(cluster) as channel:

        async def stream(first: int) -> None:
            for number in range(first, first + load.requests):
                if load.over_http:
                    streams.append(await http_stream(cluster.http_port, number, load, num_tokens))
                else:
                    answers.append(await grpc_stream(channel, number, load, num_tokens))

        await grpc_stream(channel, 10_000, load, 4)  # warm
        processes = [cluster.router, *cluster.workers, psutil.Process()]
        began, before = time.monotonic(), [cpu_s(process) for process in processes]
        await asyncio.gather(*(stream(number * load.requests) for number in range(load.streams)))
        seconds, after = time.monotonic() - began, [cpu_s(process) for process in processes]
    router_s, *workers_s, client_s = (late - early for late, early in zip(after, before, strict=True))
    text = load_tokenizer(resolve_model(MODEL)).decode([token_at(position) for position in range(num_tokens)])
    messages = sum(check_grpc(answer, num_tokens) for answer in answers)
    messages += sum(check_http(answer, text) for answer in streams)
    tokens = num_tokens * load.requests * load.streams
    return Result(load, tokens, messages, seconds, router_s, sum(workers_s), client_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="how the names of loads begin")
    parser.add_argument("--seconds", type=float, default=8, help="of each load whose requests have no length")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results = []
    for load in LOADS:
        if options.only and not load.name.startswith(tuple(options.only)):
            continue
        with running(load) as cluster:
            results.append(asyncio.run(measure(load, cluster, options.seconds)))
        print(results[-1] if results[-1].is_good else f"{results[-1]}: NOT AS WANTED", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
