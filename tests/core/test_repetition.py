"""The repetition guard, against looking at the whole output each time."""

from hypothesis import given, strategies as st

from pageferry.core.repetition import RepetitionGuard
from pageferry.core.sampling import MAX_REPEATED_TOKENS, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, Sequence, WorkItem


def repeats(output: list[int], most: int) -> bool:
    runs = range(1, min(MAX_REPEATED_TOKENS, len(output) // most) + 1)
    return any(output[-length * most :] == output[-length:] * most for length in runs)


RUNS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 5)), max_size=6)


@given(RUNS, st.integers(2, 4), st.integers(0, 5), st.integers(0, 40))
def test_it_finds_what_comparing_all_finds(
    runs: list[tuple[list[int], int]], most: int, num_prompt: int, num_first: int
) -> None:
    output = [token_id for run, count in runs for token_id in run * count]
    token_ids, guard = [0] * num_prompt + output, RepetitionGuard()
    for end in range(min(num_first, len(output)), len(output) + 1):  # the first ones are forced, all at once
        assert guard.repeats(token_ids[: num_prompt + end], num_prompt, most) == repeats(output[:end], most)


def test_runs_have_at_most_64_tokens() -> None:
    for length, expected in ((64, True), (65, False)):
        assert RepetitionGuard().repeats([*range(length)] * 3, 0, 3) is expected


def test_a_repeating_output_ends_with_its_reason_unless_a_stop_id_came() -> None:
    stop = StopParams(max_tokens=6, max_repeats=3, stop_token_ids=frozenset({9}))
    sequence = Sequence(WorkItem("x", (5, 5, 5, 5), SamplingParams(), stop), 0.0)
    reasons = []
    for token_id in (5, 5, 5):
        sequence.append(token_id)
        reasons.append(sequence.finish_reason())
    assert reasons == [None, None, FinishReason.REPETITION], "the prompt's tokens count for nothing"
    forced = Sequence(WorkItem("x", (1,), SamplingParams(), stop, (9, 9)), 0.0)
    forced.append(9)
    assert forced.finish_reason() is FinishReason.STOP
