"""Steps that stand for those to come."""

from collections.abc import Iterator

from pageferry.core.config import SchedulerConfig
from pageferry.core.plan import Chunk, Plan
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem

_BATCHES = (1, 8)


def warm_up_plans(scheduler: SchedulerConfig, page_size: int, num_pages: int, max_positions: int) -> Iterator[Plan]:
    """A full prefill chunk, then decode steps of several batch sizes, on the pool's first pages; token ids are 0."""
    room = min(num_pages * page_size, max_positions)
    length = min(max(scheduler.chunk_tokens, scheduler.local_chunk_tokens), room)
    sequence = _sequence(length, 0, -(-length // page_size))
    yield Plan((Chunk(sequence, 0, length, samples=True),), fresh=tuple(sequence.pages))
    for batch in _BATCHES:
        if batch > min(scheduler.max_num_seqs, num_pages):
            return
        sequences = [_sequence(1, page, 1) for page in range(batch)]
        fresh = tuple(PageId(page) for page in range(batch))
        yield Plan(tuple(Chunk(sequence, 0, 1, samples=True) for sequence in sequences), fresh=fresh)


def _sequence(num_tokens: int, first_page: int, num_pages: int) -> Sequence:
    work = WorkItem("warm-up", (0,) * num_tokens, SamplingParams(temperature=0), StopParams(max_tokens=1))
    pages = [PageId(first_page + page) for page in range(num_pages)]
    return Sequence(work, arrival=0.0, pages=pages)
