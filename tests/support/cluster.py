"""`pageferry up` as a child process, for tests from outside, and what such tests ask of it."""

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import grpc
from answer import Answer
from loopback import free_port

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

if TYPE_CHECKING:
    from pageferry.v1.inference_pb2_grpc import InferenceServiceAsyncStub

Stub: TypeAlias = "InferenceServiceAsyncStub"  # is in the generated stubs only, not in the module
PAGEFERRY = (sys.executable, "-m", "pageferry.cli")
POLL_S = 0.02
# For tests that wait until what was held is given back: longer than they wait, so that it does not come of time alone.
LONG_LEASES: Mapping[str, str] = {"handoff.lease_ms": "600000", "handoff.reservation_ms": "600000"}


def environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The test's environment, with settings keyed "section.field" in the form that services read."""
    named = {f"PAGEFERRY_{key.replace('.', '_').upper()}": value for key, value in (settings or {}).items()}
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"} | named


def pageferry(*arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*PAGEFERRY, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False
    )


class Cluster:
    """A running `pageferry up`; `lines` holds what it has printed so far, `times` when (monotonic seconds)."""

    def __init__(self, *arguments: str, settings: Mapping[str, str] | None = None) -> None:
        self.port, self.http_port = free_port(), free_port()
        self.address, self.http = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.http_port}"
        self.lines: list[str] = []
        self.times: list[float] = []
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        ports = ("--port", str(self.port), "--http-port", str(self.http_port))
        self.process = subprocess.Popen(
            [*PAGEFERRY, "up", *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(settings),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.times.append(time.monotonic())
            self.lines.append(line.rstrip("\n"))
            self._unread.put(self.lines[-1])
        self._unread.put(None)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self, timeout_s: float = 200) -> None:
        """Until the line `ready …` has come."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                line = self._unread.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not ready within {timeout_s} s:\n{self.output}") from None
            if line is None:
                raise AssertionError(f"ended with {self.process.wait()} before it was ready:\n{self.output}")
            if line.startswith("ready"):
                return

    def pids(self, module: str) -> list[int]:
        """The children that run `python -m pageferry.<module>`."""
        parent = self.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
        found = []
        for child in map(int, children):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if f"pageferry.{module}".encode() in command:
                    found.append(child)
        return found

    def stop(self, timeout_s: float = 100) -> int:
        """SIGTERM; the exit status. Kills what does not end in time, which fails the caller."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running {timeout_s} s after SIGTERM:\n{self.output[-4000:]}") from None
        finally:
            self._reader.join(5)
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextlib.contextmanager
def running(*arguments: str, settings: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster that is ready; drained, and found to end well, afterwards."""
    cluster = Cluster(*arguments, settings=settings)
    try:
        cluster.wait_ready()
        yield cluster
    except BaseException as error:
        error.add_note(f"what the processes said last:\n{cluster.output[-6000:]}")
        raise
    finally:
        status = cluster.stop()
    assert status == 0, cluster.output[-4000:]
    clue = cluster.output.partition("Traceback")
    assert not clue[1], f"{clue[0][-1500:]}Traceback{clue[2][:4000]}"


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        yield InferenceServiceStub(channel)


def greedy(prompt: str | list[int], max_tokens: int, *, ignore_eos: bool = True) -> pb.GenerateRequest:
    """The request for the likeliest continuation of a text or of token ids."""
    request = pb.GenerateRequest(
        sampling=SamplingParams(temperature=0), stop=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos)
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


async def generate(stub: Stub, request: pb.GenerateRequest, *, timeout_s: float = 100, **metadata: str) -> Answer:
    """Read one stream to its end, and check what holds for every one that succeeds."""
    answer = Answer()
    async for response in stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata.items())):
        answer.take(response)
    assert answer.started is not None
    assert answer.finished is not None, "the stream ended without a terminal event"
    assert answer.positions == list(range(len(answer.positions)))
    if not (request.best_of or request.HasField("beam")):
        assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices.values())
    return answer


def busy(status: pb.GetStatusResponse) -> list[str]:
    """What is not at rest, in words; empty when every page is free or cached and nothing runs or waits."""
    left = [f"router: {name}={getattr(status, name)}" for name in ("queued", "running") if getattr(status, name)]
    for worker in status.workers:
        load = worker.load
        counts = {name: getattr(load, name) for name in ("waiting", "running", "tickets", "pages_reserved")}
        counts["pages in use"] = load.pages_total - load.pages_free - load.pages_cached
        left += [f"{worker.role} {worker.address}: {name}={count}" for name, count in counts.items() if count]
        if worker.state != "ready" or not load.pages_total:
            left.append(f"{worker.role} {worker.address}: {worker.state} {worker.reason}")
    return left


async def wait_idle(stub: Stub, timeout_s: float = 60) -> pb.GetStatusResponse:
    """Until nothing is in use anywhere; fails with what still is."""
    end = time.monotonic() + timeout_s
    while left := busy(status := await stub.GetStatus(pb.GetStatusRequest())):
        assert time.monotonic() < end, f"after {timeout_s} s: {left}"
        await asyncio.sleep(POLL_S)
    return status
