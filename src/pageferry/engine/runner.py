"""Runs a scheduler's plan on the model."""

import time

import torch

from pageferry.core.plan import Plan, StepResult
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.model import Model
from pageferry.engine.pages import PageTensors
from pageferry.engine.sampler import sample


class TorchRunner:
    """The `Runner` of both services; blocks, and belongs to the engine's thread."""

    def __init__(self, model: Model, pages: PageTensors, builder: BatchBuilder) -> None:
        self._model = model
        self._pages = pages
        self._builder = builder

    def run(self, plan: Plan) -> StepResult:
        """Blank the fresh pages, make the copies, compute the chunks, draw where they sample."""
        with torch.inference_mode():
            if plan.fresh:
                self._pages.blank(plan.fresh)
            for source, target in plan.copies:
                self._pages.copy(source, target)
            if not plan.chunks:
                return StepResult(())
            start = time.perf_counter()
            logits = self._model.forward(self._builder.build(plan.chunks), self._pages)
            forward_s = time.perf_counter() - start
            samples = sample(logits, [chunk.sequence for chunk in plan.chunks if chunk.samples])
            return StepResult(samples, forward_s)
