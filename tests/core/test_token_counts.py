"""Counts of tokens, kept up as they come."""

from collections import Counter

from hypothesis import given, strategies as st

from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem

IDS = st.lists(st.integers(0, 5), max_size=12)


@given(IDS, IDS, st.lists(IDS, max_size=4))
def test_counts_are_those_of_prompt_and_output_whenever_they_are_asked_for(
    prompt: list[int], forced: list[int], steps: list[list[int]]
) -> None:
    work = WorkItem("r", tuple(prompt), SamplingParams(), StopParams(100), tuple(forced))
    sequence = Sequence(work, 0.0)
    for step in steps:
        for token_id in step:
            sequence.append(token_id)
        counts = sequence.token_counts()
        assert list(counts.ids) == list(dict.fromkeys(sequence.token_ids))
        produced = Counter(sequence.output_ids)
        assert list(counts.num_output) == [produced[token_id] for token_id in counts.ids]
