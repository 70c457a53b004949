import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pageferry.loadgen.lengths import parse_lengths
from pageferry.loadgen.load import DEFAULT_REQUESTS, Load
from pageferry.loadgen.prompts import PromptMaker, tokenizer_of
from pageferry.loadgen.questions import Questions


@pytest.fixture
def made(tiny_model: Path):
    def make(**options: Any) -> Questions:
        load = Load(parse_lengths("--input-tokens", "16..24"), parse_lengths("--output-tokens", "2..4"), **options)
        return Questions(load, PromptMaker(tokenizer_of(str(tiny_model)), seed=load.seed, chat=False))

    return make


def test_a_closed_loop_has_no_times(made) -> None:
    questions, total = made(requests=40).of_run()
    questions = list(questions)
    assert total == len(questions) == 40
    assert {question.at_s for question in questions} == {None} and {question.seed for question in questions} == {None}
    assert {question.input_tokens for question in questions} <= set(range(16, 25))
    assert {question.output_tokens for question in questions} == {2, 3, 4}
    assert len({question.prompt for question in questions}) == 40


def test_numbers_that_are_not_given(made) -> None:
    assert made().of_run()[1] == DEFAULT_REQUESTS
    questions, total = made(duration_s=5.0).of_run()
    assert total is None and len(list(itertools.islice(questions, 500))) == 500


def test_an_open_loop_ends_by_number_or_time(made) -> None:
    questions, total = made(rate=10.0, arrivals="constant", duration_s=0.5).of_run()
    assert [question.at_s for question in questions] == [0.0, 0.1, 0.2, 0.3, 0.4] and total is None
    questions, total = made(rate=10.0, arrivals="constant", duration_s=0.5, requests=3).of_run()
    assert len(list(questions)) == total == 3


def test_the_same_seed_asks_the_same(made) -> None:
    first, second = made(rate=5.0, requests=9, seed=4), made(rate=5.0, requests=9, seed=4)
    assert list(first.of_run()[0]) == list(second.of_run()[0])


def test_trials_have_their_rate_and_new_prompts(made) -> None:
    questions = made(seed=4)
    slow, fast = list(questions.at_rate(1.0, 8)), list(questions.at_rate(4.0, 8))
    assert [question.at_s for question in slow] == pytest.approx([4 * question.at_s for question in fast])
    assert not {question.prompt for question in slow} & {question.prompt for question in fast}


def test_draws_have_seeds_of_their_own(made) -> None:
    questions, _ = made(temperature=0.8, requests=9).of_run()
    assert len({question.seed for question in questions} - {None}) == 9


def test_a_trace_is_replayed(made, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp_s": at, "input_tokens": 10 + at, "output_tokens": 1 + at} for at in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    questions, total = made(replay=path, speed=2.0, duration_s=2.0).of_run()
    asked = [(question.at_s, question.input_tokens, question.output_tokens) for question in questions]
    assert asked == [(0.0, 10, 1), (0.5, 11, 2), (1.0, 12, 3), (1.5, 13, 4)] and total == 4
    assert made(replay=path, requests=2).of_run()[1] == 2
