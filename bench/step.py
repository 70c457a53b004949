"""What a decode worker's step costs beside the forward pass, part by part, in microseconds of processor time.

    python bench/step.py [--batches 1,8,32,128] [--sampling greedy,mixed] [--context 256] [--blocks 8]
                         [--model smollm2] [--threads 1] [--json FILE]

Scheduler, pools, batch builder, sampler, events and calls are a worker's own; only gRPC is missing, in whose place each
message is serialised. Each line is steps of so many streams, with the packaged model and with a forward pass that only
copies logits. Parts: `schedule` plans the step, `build` makes its tensors, `forward` computes, `sample` draws, `apply`
records, all on the engine's thread; `deliver` is the event loop's, up to the serialised messages. Figures are medians
over blocks of 16 steps, a page's worth, of the mean step; `outside` is all but `forward` and `deliver`.

Lines of `waits` are of a worker with both threads, and say how long the engine's waits: for the interpreter's lock,
which it shares with the event loop. It is time by the clock less processor time and time in the run queue.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from opentelemetry.trace import NoOpTracer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from engines import load, runner_of

from pageferry.core.config import HandoffConfig, SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.handoff import TicketTable
from pageferry.core.layout import CacheLayout
from pageferry.core.limits import ModelLimits
from pageferry.core.plan import Plan, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import WorkItem
from pageferry.decode_svc.step import DecodeStep
from pageferry.decode_svc.worker import DecodeWorker, Served
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.runner import TorchRunner
from pageferry.runtime.convert_work import work_to_proto
from pageferry.runtime.reports import Publisher
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_metrics import WorkerMetrics
from pageferry.v1 import decode_pb2, worker_pb2

Times = dict[str, float]
VOCAB, PAGE_SIZE, BLOCK = 49_152, 16, 16
SMOLLM2 = CacheLayout("bench", PageFormat.parse("int8"), PAGE_SIZE, 3, 64, (full_group(30),))
PARTS = ("schedule", "build", "forward", "sample", "apply", "deliver")
SAMPLING: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda row: {"temperature": 0},
    "temperature": lambda row: {"seed": row},
    "top_k": lambda row: {"seed": row, "temperature": 0.8, "top_k": 40},
    "top_p": lambda row: {"seed": row, "temperature": 0.8, "top_p": 0.95},
    "sampled": lambda row: {"seed": row, "temperature": 0.8, "top_p": 0.95, "top_k": 40},
    "penalties": lambda row: {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs": lambda row: {"temperature": 0, "num_logprobs": 5},
    "mixed": lambda row: SAMPLING[tuple(SAMPLING)[row % 7]](row),
}


@dataclass
class Clocks:
    """Nanoseconds of the calling thread by part, since `take`. `now` is one of its clocks."""

    now: Callable[[], int] = time.thread_time_ns
    spent: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = self.now()
            try:
                return function(*arguments)
            finally:
                self.spent[part] += self.now() - start

        return call

    def take(self) -> Times:
        """Microseconds of each part; those of `step` and `run` that are in none of their own."""
        spent, self.spent = self.spent, defaultdict(int)
        spent["sample"] = spent["run"] - spent["build"] - spent["forward"]
        spent["apply"] = spent["step"] - spent["run"] - spent["schedule"]
        return {part: spent[part] / 1e3 for part in PARTS}


class NoPages:
    """Page tensors that nobody reads."""

    layout = SMOLLM2

    def blank(self, places: Any) -> None: ...
    def copy(self, source: Any, target: Any) -> None: ...


class Copied:
    """A forward pass that copies logits: a few likely tokens before a long tail, others in every row."""

    likeliest = None

    def __init__(self, num_rows: int) -> None:
        ranks = torch.stack(
            [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) for i in range(num_rows)]
        )
        self._source = -1.5 * torch.log(ranks + 1.0)
        self._logits = torch.empty_like(self._source)

    def forward(self, batch: Any, pages: Any) -> torch.Tensor:
        num_sampled = len(batch.sampled_rows)
        return self._logits[:num_sampled].copy_(self._source[:num_sampled])


class Inline:
    """An engine's thread that is the caller's own."""

    async def call(self, command: Callable[[], Any]) -> Any:
        return command()

    def post(self, command: Callable[[], Any]) -> None:
        command()


class Reader:
    """A call's context; serialises as gRPC does."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def write(self, message: decode_pb2.DecodeResponse) -> None:
        self.num_bytes += len(message.SerializeToString())

    def time_remaining(self) -> float | None:
        return None


class Timed:
    """Something whose call of one name is timed."""

    def __init__(self, inner: Any, name: str, part: str, clocks: "Clocks") -> None:
        self._inner = inner
        setattr(self, name, clocks.timed(part, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True)
class Load:
    batch: int
    context: int
    num_blocks: int

    @property
    def num_steps(self) -> int:
        """Most that a stream runs for: other prompts are computed meanwhile, and steps end late."""
        return BLOCK * (self.num_blocks + 3) + self.batch * (self.context // 64 + 2)

    @property
    def num_pages(self) -> int:
        return self.batch * ((self.context + self.num_steps) // PAGE_SIZE + 3)


@dataclass(frozen=True)
class Model:
    """What stands behind a step."""

    layout: CacheLayout
    runner: TorchRunner


def fake_model(num_rows: int) -> Model:
    return Model(
        SMOLLM2, TorchRunner(Copied(num_rows), NoPages(), BatchBuilder(SMOLLM2, for_torch=False), 1, is_torch=False)
    )


def real_model(name: str, threads: int, num_pages: int) -> Model:
    engine = load(name, "int8", num_pages=num_pages, compute_dtype="auto", threads=threads)
    return Model(engine.layout, runner_of(engine))


class Worker:
    """A decode worker of one model, whose parts are timed."""

    def __init__(self, model: Model, load: Load, kind: str, clocks: Clocks) -> None:
        self.clocks, self.load, self.kind = clocks, load, kind
        inner = model.runner
        forward: Any = Timed(inner.model, "forward", "forward", clocks)
        build: Any = Timed(inner.builder, "build_parts", "build", clocks)
        timed: Any = replace(inner, model=forward, builder=build)
        pools = PagePools(model.layout, [load.num_pages])
        scheduler: Any = DecodeScheduler(SchedulerConfig(max_num_seqs=load.batch), pools, model.layout)
        scheduler.schedule = clocks.timed("schedule", scheduler.schedule)
        self.scheduler = scheduler
        tickets = TicketTable(bytes(16), 30.0, model.layout)
        self.runner: Any = Timed(timed, "run", "run", clocks)
        self.step: Any = DecodeStep(scheduler, pools, tickets, self.runner, time.monotonic)  # type: ignore[arg-type]
        self.step.step = clocks.timed("step", self.step.step)
        served: Any = Served(ModelLimits(VOCAB, 8192), inner.pages, ThreadPoolExecutor(1), "", HandoffConfig())
        hub: Any = WorkerHub(bytes(16), worker_pb2.Snapshot)
        self.calls: Any = DecodeWorker(self.step, served, NoOpTracer(), Publisher(hub, WorkerMetrics()), time.monotonic)
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        for row in range(self.load.batch):
            prompt = tuple((31 * row + 7 * index) % 40_000 + 10 for index in range(self.load.context))
            stop = StopParams(self.load.num_steps + 2)
            work = WorkItem(f"{row}", prompt, SamplingParams(**SAMPLING[self.kind](row)), stop)
            request = decode_pb2.DecodeRequest(work=work_to_proto(work), source=decode_pb2.PROMPT_SOURCE_LOCAL)
            self._tasks.append(asyncio.create_task(self.calls.decode(request, Reader())))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def tick(self) -> None:
        """One step, and its delivery."""
        events = self.step.step(time.monotonic())
        start = self.clocks.now()
        self.calls._deliver(events)
        for _ in range(2):
            await asyncio.sleep(0)
        self.clocks.spent["deliver"] += self.clocks.now() - start

    @property
    def is_decoding(self) -> bool:
        for task in self._tasks:
            if task.done():
                task.result()
        return self.scheduler.num_running == self.load.batch and self.scheduler.queued_prompt_tokens == 0


async def measure(worker: Worker) -> Times:
    """Microseconds of each part of a mean step."""
    worker.calls.engine = Inline()
    async with worker.streaming():
        while not worker.is_decoding:
            await worker.tick()
        blocks = []
        for _ in range(worker.load.num_blocks + 1):
            worker.clocks.take()
            for _ in range(BLOCK):
                await worker.tick()
            blocks.append({part: spent / BLOCK for part, spent in worker.clocks.take().items()})
    return {part: statistics.median(block[part] for block in blocks[1:]) for part in PARTS}


def waiting_ns() -> int:
    """A clock of the calling thread that stands still while it runs and while it waits for a processor."""
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
        queued = int(file.read().split()[1])
    return time.monotonic_ns() - time.thread_time_ns() - queued


async def wait_for_lock(worker: Worker) -> Times:
    """As `measure`, of an engine's thread beside the event loop, by the clock that `worker` has."""
    loop, over, blocks = asyncio.get_running_loop(), asyncio.Event(), []
    run, num_steps = worker.runner.run, 0

    def counted(plan: Plan) -> StepResult:
        nonlocal num_steps
        if worker.is_decoding:
            if num_steps % BLOCK == 0:
                blocks.append({part: spent / BLOCK for part, spent in worker.clocks.take().items()})
            if num_steps == BLOCK * (worker.load.num_blocks + 1):
                loop.call_soon_threadsafe(over.set)
            num_steps += 1
        assert run is not None
        return run(plan)

    worker.runner.run = counted
    worker.calls.start()
    async with worker.streaming():
        await over.wait()
    await worker.calls.stop()
    return {part: statistics.median(block[part] for block in blocks[2:]) for part in PARTS}


def line(name: str, times: Times) -> str:
    outside = sum(times.values()) - times["forward"] - times["deliver"]
    return f"{name:32}" + "".join(f"{times[part]:10.1f}" for part in PARTS) + f"{outside:10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--sampling", type=lambda text: text.split(","), default=list(SAMPLING))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--model", default="smollm2", help="beside the pass that copies; none where it is empty")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Times] = {}
    print(f"{'microseconds a step':32}" + "".join(f"{part:>10}" for part in (*PARTS, "outside")))
    for batch in options.batches:
        load = Load(batch, options.context, options.blocks)
        models = {"copied": fake_model(batch)}
        if options.model:
            models[options.model] = real_model(options.model, options.threads, load.num_pages)
        for (name, model), kind in product(models.items(), options.sampling):
            key = f"{name}, {kind}, {batch}"
            results[key] = asyncio.run(measure(Worker(model, load, kind, Clocks())))
            print(line(key, results[key]), flush=True)
            if kind == "greedy" and Path("/proc/self/schedstat").exists():
                key += ", waits"
                results[key] = asyncio.run(wait_for_lock(Worker(model, load, kind, Clocks(waiting_ns))))
                print(line(key, results[key]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
