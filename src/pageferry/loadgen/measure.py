"""A whole measurement: warm up, put the load on, watch, and put the result together."""

import asyncio
import gc
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from pageferry.loadgen import goodput, notes
from pageferry.loadgen.drive import Driven, Driver, took_ctrl_c
from pageferry.loadgen.load import Load
from pageferry.loadgen.observe import Observer, Processes, machine
from pageferry.loadgen.questions import Questions
from pageferry.loadgen.result import SCHEMA, BenchResult, GoodputSearch, Record, Sample, Trial
from pageferry.loadgen.summary import Observed, summarise
from pageferry.loadgen.target import Question, Target

_PREPARED = 4096  # questions made before a run begins; the rest are made while it goes on
_TRIAL_REQUESTS = 50
_TRIAL_S = 20.0
_SHARE = 0.99
_RATES = (0.5, 64.0)
_SETTLE_S = 10.0
_POLL_S = 0.1


class Progress(Protocol):
    """Shows how far it is. `total` is None where time ends the run."""

    def begin(self, what: str, total: int | None) -> None: ...

    def advance(self, failed: bool) -> None: ...


@dataclass(slots=True)
class _Run:
    """One run's raw figures."""

    driven: Driven
    samples: list[Sample]
    observed: Observed


@dataclass(slots=True)
class Measurement:
    """Measures one target under one load; used once. The target is the caller's to close."""

    target: Target
    load: Load
    questions: Questions
    progress: Progress
    processes: Processes
    label: str = ""
    command: str = ""
    interrupted: bool = False  # by Ctrl-C, once `run` has returned
    _notes: list[str] = field(default_factory=list)

    async def run(self) -> BenchResult:
        """Raises PageferryError where the target can't be measured; Ctrl-C gives what was measured until then."""
        self._notes += await self.target.prepare()
        await self._warm_up()
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        search: GoodputSearch | None = None
        if self.load.mode == "goodput":
            run, search = await self._find_goodput()
        else:
            run = await self._run_once()
        summary = summarise(run.driven.records, run.samples, run.observed, self.load.slo)
        self._notes += notes.of_run(run.driven, summary, run.observed, self.questions.shared_tokens)
        return BenchResult(
            schema=SCHEMA,
            label=self.label,
            started=started,
            command=self.command,
            target=self.target.info,
            load=self.load.as_given(),
            machine=machine(),
            summary=summary,
            requests=tuple(sorted(run.driven.records, key=lambda record: record.start_s)),
            samples=tuple(run.samples),
            goodput_search=search,
            notes=tuple(self._notes),
        )

    async def _warm_up(self) -> None:
        if not self.load.warmup:
            return
        self.progress.begin("warming up", self.load.warmup)
        questions = itertools.islice(self.questions.endless(), self.load.warmup)
        driver = Driver(self.target, self.load.timeout_s, self._advance)
        driven = await driver.closed(questions, self.load.concurrency or 1, None)
        if driven.interrupted:
            raise asyncio.CancelledError  # nothing was measured
        if failed := [record.error for record in driven.records if record.error]:
            self._notes.append(f"{len(failed)} of {self.load.warmup} warm-up requests failed: {failed[0]}")

    async def _run_once(self) -> _Run:
        questions, total = self.questions.of_run()
        return await self._drive("measuring", questions, total, Driver(self.target, self.load.timeout_s, self._advance))

    async def _find_goodput(self) -> tuple[_Run, GoodputSearch]:
        """The run returned is that at the best rate, else the last one."""
        share = self.load.goodput_share or _SHARE
        runs: dict[float, _Run] = {}

        async def run_trial(rate: float) -> Trial | None:
            seconds = self.load.duration_s or _TRIAL_S
            count = max(self.load.requests or _TRIAL_REQUESTS, math.ceil(rate * seconds))
            runs[rate] = run = await self._trial(rate, count, share)
            if run.driven.interrupted:
                self._notes.append("interrupted: the search for the highest rate is not over")
                return None
            records = run.driven.records
            kept = sum(self._keeps(record) for record in records) / len(records)
            return Trial(rate, kept, kept >= share)

        low, high = self.load.rate_range or _RATES
        found = await goodput.search(run_trial, low, high)
        self._notes += notes.of_search(found, low, high)
        return runs[next(reversed(runs)) if found.rate is None else found.rate], found

    async def _trial(self, rate: float, count: int, share: float) -> _Run:
        """Broken off once so many requests have missed the limits that the share can't be reached."""
        allowed = count - math.ceil(share * count)
        missed = 0

        def on_record(record: Record) -> bool:
            nonlocal missed
            self._advance(record)
            missed += not self._keeps(record)
            return missed > allowed

        driver = Driver(self.target, self.load.timeout_s, on_record)
        run = await self._drive(f"{rate:.3g} requests/s", self.questions.at_rate(rate, count), count, driver)
        if not run.driven.interrupted:
            try:
                await self._settle()
            except asyncio.CancelledError:
                self.interrupted = run.driven.interrupted = took_ctrl_c()
        return run

    async def _settle(self) -> None:
        """Until the server has dropped what a trial that was broken off left with it; blindly, where it doesn't say."""
        for _ in range(round(_SETTLE_S / _POLL_S)):
            server = await self.target.server_load()
            await asyncio.sleep(_POLL_S if server is not None else 10 * _POLL_S)
            if server is None or not (server.running or server.waiting):
                return

    async def _drive(self, what: str, questions: Iterator[Question], total: int | None, driver: Driver) -> _Run:
        self.progress.begin("preparing", None)
        prepared = list(itertools.islice(questions, _PREPARED))
        questions = itertools.chain(prepared, questions)
        observer = Observer(self.target, self.processes)
        gc.collect()
        gc.freeze()  # what is there now need not be looked through while times are taken
        self.progress.begin(what, total)
        async with observer.watching():
            if self.load.mode == "closed":
                driven = await driver.closed(questions, self.load.concurrency or 1, self.load.duration_s)
            else:
                driven = await driver.open(questions, self.load.max_concurrency)
        self.interrupted = driven.interrupted
        return _Run(driven, observer.samples, observer.observed(driven.send_lags_ms))

    def _advance(self, record: Record) -> bool:
        self.progress.advance(record.error is not None)
        return False

    def _keeps(self, record: Record) -> bool:
        return self.load.slo is not None and self.load.slo.keeps(record)
