"""Runs a scheduler's plan on the model."""

import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.plan import Chunk, Plan, StepResult
from pageferry.engine.batch import Batch, BatchBuilder, Part
from pageferry.engine.pages import PageTensors
from pageferry.engine.prompt_rows import take_prompt_rows
from pageferry.engine.sampler import Sampler
from pageferry.engine.verify import Verifier


class ForwardPass(Protocol):
    """A model: torch's `Model`, or `NativeModel`.

    `likeliest` [S] are the ids of the largest of the last call's logits, -1 for a row of which a number is not finite;
    None where they are not found on the way. `device_s` are the last call's seconds by the device's own clock; None
    where that is a processor.
    """

    @property
    def likeliest(self) -> NDArray[np.int32] | None: ...
    @property
    def device_s(self) -> float | None: ...

    def forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        """Store the batch's keys and values; logits [S, vocab] fp32 of the sampled rows, valid until the next call."""
        ...

    def first_layers(self, num_layers: int) -> "ForwardPass":
        """A model of these alone and of the same head, which stores keys and values as this one does in them."""
        ...


class Drafter(Protocol):
    """Guesses what tokens come next."""

    def draft(self, chunks: ListLike[Chunk]) -> list[list[int]]:
        """For each chunk up to its `num_drafts`; writes to no position that has been computed."""
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
    drafter: Drafter | None = None

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
        began = time.perf_counter()
        drafts = self._drafts(plan.chunks)
        drafted = time.perf_counter()
        parts = [Part.of(chunk, guessed) for chunk, guessed in zip(plan.chunks, drafts, strict=True)]
        batch = self.builder.build_parts(parts)
        start = time.perf_counter()
        logits = self.model.forward(batch, self.pages)
        forward_s, device_s = time.perf_counter() - start, self.model.device_s
        counts = [len(guessed) for guessed in drafts]
        logits, likeliest, reported = take_prompt_rows(plan.chunks, counts, logits, self.model.likeliest, self.sampler)
        sampling = [
            (chunk.sequence, guessed) for chunk, guessed in zip(plan.chunks, drafts, strict=True) if chunk.samples
        ]
        sequences, guesses = zip(*sampling, strict=True) if sampling else ((), ())
        samples = Verifier(self.sampler, logits, likeliest).samples(sequences, guesses)
        num_drafted = tuple(len(guessed) for guessed in guesses)
        verify_s = time.perf_counter() - drafted
        return StepResult(samples, forward_s, reported, num_drafted, drafted - began, verify_s, device_s)

    def _drafts(self, chunks: ListLike[Chunk]) -> list[ListLike[int]]:
        """Of each chunk."""
        drafts: list[ListLike[int]] = [chunk.drafts for chunk in chunks]
        if self.drafter is not None:
            wanting = [i for i, chunk in enumerate(chunks) if chunk.num_drafts and not chunk.drafts]
            if wanting:
                made = self.drafter.draft([chunks[i] for i in wanting])
                for i, tokens in zip(wanting, made, strict=True):
                    drafts[i] = tokens
        return drafts
