"""The prompts that a decode worker computes beside decoding, in chunks so short that streams hardly notice."""

from collections.abc import Iterable

from pageferry.core.chunks import prefill_order, prompt_chunk
from pageferry.core.config import SchedulerConfig
from pageferry.core.page_tables import PageTables
from pageferry.core.plan import Chunk
from pageferry.core.sequence import Sequence
from pageferry.core.sequence_queues import Key


class LocalPrefill:
    """Shares `local_chunk_tokens` of each step over the running sequences that have more than a token to compute."""

    def __init__(self, config: SchedulerConfig, tables: PageTables) -> None:
        self._tables = tables
        self._chunk_tokens = config.local_chunk_tokens
        self._ageing_tokens_per_s = config.ageing_tokens_per_s

    def chunks(self, running: Iterable[Sequence]) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self._chunk_tokens
        for sequence in sorted(_prompts(running), key=lambda one: self._order(one, one.num_remaining)):
            chunk = prompt_chunk(sequence, budget, self._tables.page_size, is_first=not chunks)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_tokens
        return chunks

    def has_room_for(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a step's tokens reach one that waits, after those that are computed before it."""
        prompts = _prompts(running)
        if not prompts:
            return True
        order = self._order(waiting, len(waiting.token_ids) - self._tables.num_cached(waiting))
        before = sum(one.num_remaining for one in prompts if self._order(one, one.num_remaining) <= order)
        return before < self._chunk_tokens

    def _order(self, sequence: Sequence, num_remaining: int) -> Key:
        return prefill_order(sequence, num_remaining, self._ageing_tokens_per_s)


def _prompts(running: Iterable[Sequence]) -> list[Sequence]:
    return [sequence for sequence in running if sequence.num_remaining > 1]
