"""A decode scheduler and an engine stepped together, without a service around them."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.drafts import DraftSource
from pageferry.core.plan import Output
from pageferry.core.pools import PagePools
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.core.speculation import Speculation
from pageferry.core.step_costs import StepCosts
from pageferry.engine.load import Engine


class FreeRows(StepCosts):
    """Rows cost next to nothing, whatever the machine does: drafts are made wherever there is a chance."""

    def step_s(self, rows: int) -> float:
        return 1.0

    @property
    def row_s(self) -> float:
        return 1e-6


@dataclass
class Decoding:
    """What a worker's step does: schedule, run, apply; prompts are computed here."""

    engine: Engine
    speculation: str = "off"
    max_drafts: int = 8
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_pages: int = 0  # of each group's pool; 0: the engine's
    costs: StepCosts = field(default_factory=FreeRows)
    step_count: int = 0

    def __post_init__(self) -> None:
        layout = self.engine.layout
        num_pages = (self.num_pages,) * len(layout.groups) if self.num_pages else self.engine.num_pages
        self.pools = PagePools(layout, num_pages, self.engine.num_tails)
        speculation = Speculation(DraftSource.parse(self.speculation), self.max_drafts, self.costs)
        self.scheduler = DecodeScheduler(self.scheduler_config, self.pools, layout, speculation)

    def add(self, sequences: Iterable[Sequence]) -> None:
        for one in sequences:
            self.scheduler.add(one, time.monotonic())

    def step(self) -> Output | None:
        """None where nothing is left."""
        plan = self.scheduler.schedule(time.monotonic())
        if plan is None:
            return None
        self.step_count += 1
        return self.scheduler.apply(plan, self.engine.runner.run(plan), time.monotonic())

    def outputs(self, sequences: list[Sequence]) -> list[list[int]]:
        """Each one's tokens once all are over."""
        self.add(sequences)
        emitted: dict[Sequence, list[int]] = {one: [] for one in sequences}
        while (output := self.step()) is not None:
            for token in output.emitted:
                assert token.position == len(emitted[token.sequence]), "a gap or a repeat"
                emitted[token.sequence].append(token.token.token_id)
            assert not any(ended.failure for ended in output.ended)
        self.pools.check_integrity()
        return list(emitted.values())


def requested(
    prompt_ids: Iterable[int], max_tokens: int, sampling: SamplingParams, *, number: int = 0, stop: Iterable[int] = ()
) -> Sequence:
    limits = StopParams(max_tokens, stop_token_ids=frozenset(stop))
    work = WorkItem(f"request-{number}", tuple(prompt_ids), sampling, limits, speculate=True)
    return Sequence(work, arrival=float(number))
