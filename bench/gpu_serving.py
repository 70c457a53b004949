"""Serves a model on a device, from one engine and from a prefill and a decode worker, and says how many tokens come."""

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from cluster import connected, generate, greedy, running

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.layout import Place
from pageferry.core.plan import Chunk, Plan
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.engine.load import Engine, load_engine


@dataclass(frozen=True)
class Load:
    model: str
    device: str
    page_format: str
    prompt: int  # tokens
    chunk: int
    context: int  # tokens before a decode step
    steps: int
    batches: tuple[int, ...] = (1, 8, 32)

    @property
    def num_pages(self) -> int:
        return max(self.batches) * (-(-(self.context + self.steps) // 16) + 1) + -(-self.prompt // 16)


def one_engine(load: Load) -> Iterator[str]:
    """Rows of a table; the model is warm, so that decode steps are CUDA graphs on a GPU."""
    scheduler = SchedulerConfig(max_num_seqs=max(load.batches), chunk_tokens=load.chunk)
    config = EngineConfig(model=load.model, device=load.device, page_format=load.page_format, num_pages=load.num_pages)
    engine = load_engine(config, scheduler, progress=lambda line: print(f"gpu: {line}", file=sys.stderr))
    started = time.perf_counter()
    engine.warm_up()
    yield f"| warm-up | {time.perf_counter() - started:.1f} s | |"
    ends = [*range(load.chunk, load.prompt, load.chunk), load.prompt]
    (prompt,) = sequences(engine, 1, load.prompt)
    seconds = timed(engine, [[(prompt, start, end - start)] for start, end in zip([0, *ends], ends, strict=False)])
    yield f"| prefill of {load.prompt} in chunks of {load.chunk} | {load.prompt / seconds:.0f} tokens/s | |"
    for batch in load.batches:
        members = sequences(engine, batch, load.context + load.steps)
        steps = [[(member, load.context + step, 1) for member in members] for step in range(load.steps)]
        seconds = timed(engine, steps) / load.steps
        figures = f"{batch / seconds:.0f} tokens/s | {seconds * 1e3:.2f} ms a step"
        yield f"| decode of {batch} at {load.context} | {figures} |"


def sequences(engine: Engine, count: int, num_tokens: int) -> list[Sequence]:
    """Each on blank pages of its own: what they hold doesn't change what is computed."""
    pages = engine.layout.num_pages(num_tokens)
    made, num_groups = [], len(engine.layout.groups)
    for i in range(count):
        ids = tuple((i + 7 * token) % 1000 for token in range(num_tokens))
        work = WorkItem(f"bench-{i}", ids, SamplingParams(temperature=0), StopParams(max_tokens=1))
        table = [PageId(i * pages + page) for page in range(pages)]
        tail = PageId(i) if engine.layout.format.has_tails else None
        made.append(Sequence(work, 0.0, tables=[list(table) for _ in range(num_groups)], tail=tail))
    fresh = [Place(group, page) for target in made for group, table in enumerate(target.tables) for page in table]
    engine.runner.run(Plan((), fresh=tuple(fresh)))
    return made


def timed(engine: Engine, steps: list[list[tuple[Sequence, int, int]]]) -> float:
    """Seconds of all steps, sampling included; each samples in its last chunk as serving does."""
    started = time.perf_counter()
    for step in steps:
        result = engine.runner.run(Plan(tuple(Chunk(*part, samples=True) for part in step)))
        assert len(result.samples) == len(step)
    return time.perf_counter() - started


def two_workers(load: Load) -> Iterator[str]:
    """Prompts computed by one worker go to the other through pinned memory; the same answer must come every time."""
    devices = ("--prefill-devices", load.device, "--decode-devices", load.device, "--pages", load.page_format)
    settings = {"router.local_prefill_tokens": "0", "engine.num_pages": str(2 * load.num_pages)}
    with running(
        "--prefill", "1", "--decode", "1", "--model", load.model, *devices, settings=settings, ready_s=180
    ) as up:

        async def answers(count: int) -> list[list[int]]:
            async with connected(up) as stub:
                ids = [(7 * token) % 300 for token in range(load.context)]
                requests = [generate(stub, greedy(ids, load.steps), timeout_s=120) for _ in range(count)]
                return [answer.token_ids for answer in await asyncio.gather(*requests)]

        first = asyncio.run(answers(1))[0]
        for batch in load.batches:
            started = time.perf_counter()
            came = asyncio.run(answers(batch))
            seconds = time.perf_counter() - started
            same = sum(ids == first for ids in came)
            rate = batch * load.steps / seconds
            yield f"| {batch} requests over two workers | {rate:.0f} tokens/s | {same} of {batch} as alone |"
