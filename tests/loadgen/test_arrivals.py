import itertools
import json
from pathlib import Path

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.arrivals import Traced, arrivals, constant, poisson, read_trace


def first(times, count: int) -> list[float]:
    return list(itertools.islice(times, count))


def test_constant_arrivals_are_even() -> None:
    assert first(constant(4.0), 4) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_their_rate_and_vary() -> None:
    times = first(poisson(5.0, seed=1), 4000)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[-1] == pytest.approx(4000 / 5, rel=0.05)
    assert min(gaps) > 0
    share_long = sum(gap > 1 / 5 for gap in gaps) / len(gaps)
    assert share_long == pytest.approx(0.368, abs=0.03)  # 1/e of an exponential's gaps are above its mean


def test_a_seed_gives_the_same_arrivals_at_every_rate() -> None:
    slow, fast = first(poisson(1.0, seed=3), 20), first(poisson(2.0, seed=3), 20)
    assert slow == pytest.approx([2 * at for at in fast])
    assert slow != first(poisson(1.0, seed=4), 20)


def test_arrivals_by_name() -> None:
    assert first(arrivals("constant", 2.0, 0), 3) == [0.0, 0.5, 1.0]
    assert first(arrivals("poisson", 2.0, 7), 3) == first(poisson(2.0, 7), 3)


def trace(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_in_both_spellings_sorted_and_from_its_first(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"timestamp_s": 3.0, "input_tokens": 10, "output_tokens": 5},
        "\n",
        {"timestamp": 1000, "input_length": 20, "output_length": 6, "hash_ids": [1, 2]},
    )
    assert read_trace(path) == [Traced(0.0, 20, 6), Traced(2.0, 10, 5)]
    assert [request.at_s for request in read_trace(path, speed=4.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON object"),
        ("[1]\n", "is no JSON object"),
        ({"input_tokens": 1, "output_tokens": 1}, "has no timestamp_s or timestamp"),
        ({"timestamp": 0, "output_tokens": 1}, "has no input_tokens or input_length"),
        ({"timestamp": "0", "input_tokens": 1, "output_tokens": 1}, "timestamp must be a number"),
        ({"timestamp": True, "input_tokens": 1, "output_tokens": 1}, "timestamp must be a number"),
        ({"timestamp": 0, "input_tokens": 0, "output_tokens": 1}, "input tokens is 0, must be a whole number from 1"),
        ({"timestamp": 0, "input_tokens": 1, "output_tokens": 1.5}, "output tokens is 1.5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, problem: str) -> None:
    good = {"timestamp": 0, "input_tokens": 1, "output_tokens": 1}
    with pytest.raises(InvalidArgumentError) as caught:
        read_trace(trace(tmp_path, good, line))
    assert "trace.jsonl:2" in caught.value.message and problem in caught.value.message


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="holds no request"):
        read_trace(trace(tmp_path, "\n"))
    with pytest.raises(InvalidArgumentError, match="can't be read: No such file"):
        read_trace(tmp_path / "none")
