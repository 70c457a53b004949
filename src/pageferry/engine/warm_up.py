"""Steps that stand for those to come."""

from collections.abc import Iterator, Sequence as ListLike
from dataclasses import replace

from pageferry.core.config import SchedulerConfig
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.plan import Chunk, Plan
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem, page_table

_BATCHES = (1, 8, 32)  # the largest as many as run unless set otherwise: its memory is taken from the start


def warm_up_plans(
    scheduler: SchedulerConfig, layout: CacheLayout, num_pages: ListLike[int], max_positions: int
) -> Iterator[Plan]:
    """A full prefill chunk, decode steps of several batch sizes, and one with a draft where the runner makes them.

    On the pools' first pages; token ids are 0.
    """
    room = min(min(num_pages) * layout.page_size, max_positions)
    length = min(max(scheduler.chunk_tokens, scheduler.local_chunk_tokens), room)
    yield _plan([_sequence(length, 0, layout)])
    if layout.page_size > 1:
        plan = _plan([_sequence(1, 0, layout)])
        yield replace(plan, chunks=(replace(plan.chunks[0], num_drafts=1),))
    for batch in _BATCHES:
        if batch > min(scheduler.max_num_seqs, *num_pages):
            return
        yield _plan([_sequence(1, page, layout) for page in range(batch)])


def _sequence(num_tokens: int, first_page: int, layout: CacheLayout) -> Sequence:
    work = WorkItem("warm-up", (0,) * num_tokens, SamplingParams(temperature=0), StopParams(max_tokens=1))
    pages = [PageId(first_page + page) for page in range(layout.num_pages(num_tokens))]
    tail = PageId(first_page) if layout.format.has_tails else None
    return Sequence(work, arrival=0.0, tables=[page_table(pages) for _ in layout.groups], tail=tail)


def _plan(sequences: list[Sequence]) -> Plan:
    fresh = tuple(
        Place(group, page) for target in sequences for group, table in enumerate(target.tables) for page in table
    )
    chunks = tuple(Chunk(target, 0, len(target.token_ids), samples=True) for target in sequences)
    return Plan(chunks, fresh=fresh)
