"""What both schedulers do with chunks: how long one is, what a plan of them needs, and what a step has changed."""

from collections.abc import Iterator

from pageferry.core.page_tables import PageTables
from pageferry.core.plan import Chunk, Plan, SampledToken, SampleFailure, StepResult
from pageferry.core.pool import PageId
from pageferry.core.sequence import Sequence, SequenceStatus
from pageferry.core.sequence_queues import Key


def prefill_order(sequence: Sequence, num_remaining: int, ageing_tokens_per_s: float) -> Key:
    """The order of prompts: by priority, then the least left to compute, less what it has gained by waiting.

    All gain at the same rate, so that the order of two that wait never changes and `now` is not needed.
    """
    return (sequence.work.priority, num_remaining + ageing_tokens_per_s * sequence.arrival)


def prompt_chunk(
    sequence: Sequence, budget: int, page_size: int, *, is_first: bool, final_tokens: int = 0
) -> Chunk | None:
    """The sequence's next chunk of at most `budget` tokens.

    It ends with a page or with the tokens, so that whole pages can be shipped. Where the budget doesn't reach the end
    of a page, a chunk that is first in its plan ends anywhere, and another is left for a later step. With
    `final_tokens`, a chunk more than twice as long doesn't end the prompt: so many are left for one more chunk.
    """
    start, end = sequence.num_computed, min(len(sequence.token_ids), sequence.num_computed + budget)
    if end == len(sequence.token_ids) and end - start > 2 * final_tokens > 0:
        end -= final_tokens
    if end < len(sequence.token_ids):
        aligned = end - end % page_size
        if aligned <= start and not is_first:
            return None
        end = aligned if aligned > start else end
    return Chunk(sequence, start, end - start, samples=end == len(sequence.token_ids)) if end > start else None


def start_step(chunks: list[Chunk], preempted: tuple[Sequence, ...], tables: PageTables, now: float) -> Plan:
    """The plan of the chunks; from here to `end_step` released pages stay out of the pool."""
    fresh: list[PageId] = []
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
        # A page is new to its sequence in the step that computes the page's first position.
        fresh += sequence.pages[tables.num_pages(chunk.start) : tables.num_pages(chunk.start + chunk.num_tokens)]
    return Plan(tuple(chunks), tuple(fresh), tables.begin_step(), preempted)


def end_step(
    plan: Plan, result: StepResult, tables: PageTables
) -> Iterator[tuple[Sequence, SampledToken | SampleFailure]]:
    """Record the chunks as computed and yield what was sampled, skipping sequences that were aborted meanwhile."""
    samples = iter(result.samples)
    for chunk in plan.chunks:
        sequence = chunk.sequence
        sample = next(samples) if chunk.samples else None
        if sequence.status is SequenceStatus.FINISHED:
            continue
        end = chunk.start + chunk.num_tokens
        sequence.num_computed = end
        sequence.num_steps += 1
        if not isinstance(sample, SampleFailure):  # else its pages may hold what is not a number
            tables.store(sequence, chunk.start, end)
        if sample is not None:
            yield sequence, sample
    tables.end_step()
