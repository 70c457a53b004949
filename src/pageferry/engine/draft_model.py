"""A separate draft model beside its target."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.drafts import DraftSource
from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout
from pageferry.core.memory import DrafterNeeds, MemoryPlan
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, map_gguf, resolve_model
from pageferry.core.model_shapes import check_shapes, expected_shapes
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.drafter import OtherModelDrafter
from pageferry.engine.gguf_tensors import ROPE_FACTORS
from pageferry.engine.loaders import make_loader, open_tensors
from pageferry.engine.rope import inverse_frequencies

_FORMAT = PageFormat.parse("int8")  # of its pages, whatever the target's: drafts are checked


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Found and checked, but not loaded; reads its files anew for each call."""

    files: ModelFiles
    config: ModelConfig
    layout: CacheLayout
    group: int  # the target's first full one
    engine: EngineConfig
    scheduler: SchedulerConfig

    @property
    def needs(self) -> DrafterNeeds:
        with closing(open_tensors(self.files, self.config)) as tensors:
            loader = make_loader(self.engine, self.scheduler, self.config, self.layout, tensors)
            return DrafterNeeds(self.config, loader.weight_bytes, self.layout.pages[0].page_bytes)

    def load(self, max_positions: int, num_pages: int, progress: Callable[[str], None]) -> OtherModelDrafter:
        """With as many pages as the target's first full group has, for texts of up to `max_positions`."""
        with closing(open_tensors(self.files, self.config)) as tensors:
            check_shapes(expected_shapes(self.config), tensors.shapes)
            loader = make_loader(self.engine, self.scheduler, self.config, self.layout, tensors)
            factors = tensors.load(ROPE_FACTORS) if ROPE_FACTORS in tensors.shapes else None
            model = loader.load(inverse_frequencies(self.config, factors), max_positions, progress)
        pages = loader.pages(self.layout, MemoryPlan((num_pages,), 0, {}))
        builder = BatchBuilder(self.layout, for_torch=loader.for_torch, group_of=(self.group,))
        return OtherModelDrafter(model, pages, builder, chunk_tokens=self.scheduler.local_chunk_tokens)


def open_draft_model(
    engine: EngineConfig, scheduler: SchedulerConfig, target: ModelFiles, vocab_size: int, layout: CacheLayout
) -> DraftModel | None:
    """None where `engine.speculation` names none.

    Raises InvalidArgumentError where it can't draft for the target: another vocabulary, or no group that keeps all.
    """
    source = DraftSource.parse(engine.speculation)
    if source.kind != "draft":
        return None
    files = resolve_model(source.path)
    config = load_config_of(files)
    if config.vocab_size != vocab_size:
        why = f"has {config.vocab_size} tokens, must have those of the target, which are {vocab_size}"
        raise invalid("speculation", engine.speculation, f"names a model that {why}")
    if _vocabulary(files) != _vocabulary(target):
        limit = f"must name a model with the same tokenizer as {target.name}, as a file of the same kind"
        raise invalid("speculation", engine.speculation, limit)
    full = [number for number, group in enumerate(layout.groups) if group.window is None]
    if not full:
        raise invalid("speculation", engine.speculation, "needs layers that keep all tokens, and cache_layers has none")
    # A draft model that was made for shorter texts still drafts for longer ones, less well.
    own = CacheLayout(
        f"draft of {layout.fingerprint}",
        _FORMAT,
        layout.page_size,
        config.num_kv_heads,
        config.head_dim,
        (full_group(config.num_layers),),
    )
    return DraftModel(files, config, own, full[0], replace(engine, cache_layers="", page_format="int8"), scheduler)


def _vocabulary(files: ModelFiles) -> object:
    """What must be equal for token ids to mean the same."""
    if files.kind == "gguf":
        buffer, file = map_gguf(files.path)
        buffer.close()
        return "gguf", file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.merges")
    path = files.path / "tokenizer.json"
    try:
        model = json.loads(path.read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{path} can't be read: {error}", reason="MODEL_INVALID") from error
    return "hf", model.get("vocab"), model.get("merges")
