"""Runs a scheduler's plan on the model."""

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.plan import Plan, SampleFailure, StepResult
from pageferry.engine.batch import Batch, BatchBuilder
from pageferry.engine.pages import PageTensors
from pageferry.engine.prompt_rows import take_prompt_rows
from pageferry.engine.sampler import Sampler, SampleRow


class ForwardPass(Protocol):
    """A model: torch's `Model`, or `NativeModel`.

    `likeliest` [S] are the ids of the largest of the last call's logits, -1 for a row of which a number is not finite;
    None where they are not found on the way.
    """

    @property
    def likeliest(self) -> NDArray[np.int32] | None: ...

    def forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        """Store the batch's keys and values; logits [S, vocab] fp32 of the sampled rows, valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class TorchRunner:
    """The `Runner` of both services; blocks, and belongs to the engine's thread."""

    model: ForwardPass
    pages: PageTensors
    builder: BatchBuilder
    num_threads: int
    is_torch: bool = True  # whether torch computes: else its inference mode does nothing but cost
    sampler: Sampler = field(default_factory=Sampler)

    def run(self, plan: Plan) -> StepResult:
        """Blank the fresh pages, make the copies, compute the chunks, draw where they sample."""
        # OpenMP keeps this number per calling thread, and loading ran on another one than the engine's.
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if not self.is_torch:
            return self._run(plan)
        with torch.inference_mode():
            return self._run(plan)

    def _run(self, plan: Plan) -> StepResult:
        if plan.fresh:
            self.pages.blank(plan.fresh)
        for source, target in plan.copies:
            self.pages.copy(source, target)
        if not plan.chunks:
            return StepResult(())
        batch = self.builder.build(plan.chunks)
        start = time.perf_counter()
        logits = self.model.forward(batch, self.pages)
        forward_s = time.perf_counter() - start
        logits, likeliest, reported = take_prompt_rows(plan.chunks, logits, self.model.likeliest, self.sampler)
        rows = [SampleRow(chunk.sequence) for chunk in plan.chunks if chunk.samples]
        drawn = self.sampler.sample(logits, rows, likeliest)
        samples = tuple(one if isinstance(one, SampleFailure) else (one,) for one in drawn)
        return StepResult(samples, forward_s, reported)
