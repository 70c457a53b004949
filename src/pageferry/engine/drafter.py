"""Drafts from a smaller model: the target's own first layers, or another model with pages of its own."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from pageferry.core.config import EngineConfig
from pageferry.core.drafts import DraftSource
from pageferry.core.errors import invalid
from pageferry.core.model_config import ModelConfig
from pageferry.core.plan import Chunk, SampleFailure
from pageferry.engine.adjust import SampleRow
from pageferry.engine.batch import BatchBuilder, Part
from pageferry.engine.pages import PageTensors
from pageferry.engine.runner import ForwardPass
from pageferry.engine.sampler import Sampler

Drafts = list[list[int]]


def draft_source(engine: EngineConfig, model: ModelConfig) -> DraftSource:
    """Raises InvalidArgumentError where the model can't have the drafts that are asked for."""
    source = DraftSource.parse(engine.speculation)
    if source.kind == "layers" and source.num_layers >= model.num_layers:
        limit = f"must be fewer layers than the model's {model.num_layers}"
        raise invalid("speculation", engine.speculation, limit)
    return source


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """Draws one draft after the other, all sequences' at once, each as the target would with the drafter's logits.

    That is with the target's own random numbers, so that where both have the same distribution they draw the same.
    """

    model: ForwardPass
    pages: PageTensors
    builder: BatchBuilder
    sampler: Sampler = field(default_factory=Sampler)

    def draft(self, chunks: ListLike[Chunk]) -> Drafts:
        """The chunks' own tokens first, which are all that is not computed; then each draft behind the last one."""
        return self._draft([Part.of(chunk) for chunk in chunks], [chunk.num_drafts for chunk in chunks])

    def _draft(self, parts: list[Part], counts: list[int]) -> Drafts:
        drafts: Drafts = [[] for _ in parts]
        pending = [i for i, part in enumerate(parts) if part.num_tokens]
        while pending:
            batch = self.builder.build_parts([parts[i] for i in pending])
            logits = self.model.forward(batch, self.pages)
            pending = [i for i in pending if parts[i].num_sampled]
            rows = [SampleRow(parts[i].sequence, tuple(drafts[i])) for i in pending]
            drawn = self.sampler.sample(logits, rows, self.model.likeliest)
            going_on = []
            for i, one in zip(pending, drawn, strict=True):
                if isinstance(one, SampleFailure):  # the target shall say so itself
                    continue
                drafts[i].append(one.token_id)
                if len(drafts[i]) < counts[i]:
                    parts[i] = Part(parts[i].sequence, parts[i].end, [one.token_id], 1)
                    going_on.append(i)
            pending = going_on
        return drafts


@dataclass(frozen=True, slots=True)
class OtherModelDrafter(ModelDrafter):
    """A draft model, whose pages have the numbers of those in the target's first full group.

    It computes prompts itself, `chunk_tokens` of a step at most, and drafts for a sequence once it has caught up. Pages
    that were swapped for equal ones, or shared without having been drafted on, hold something else: drafts are then
    accepted less often, and nothing else follows.
    """

    chunk_tokens: int = 128

    def draft(self, chunks: ListLike[Chunk]) -> Drafts:
        parts, counts, budget = [], [], self.chunk_tokens
        for chunk in chunks:
            sequence = chunk.sequence
            start, end = sequence.num_draft_computed, len(sequence.token_ids)
            until = min(end, start + budget)
            budget -= until - start
            has_caught_up = start < until == end
            parts.append(Part(sequence, start, sequence.token_ids[start:until], int(has_caught_up)))
            counts.append(chunk.num_drafts if has_caught_up else 0)
            sequence.num_draft_computed = until
        return self._draft(parts, counts)
