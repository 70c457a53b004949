from random import Random
from statistics import mean, median

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.lengths import MAX_TOKENS, parse_lengths


def drawn(text: str, count: int = 2000) -> list[int]:
    lengths, random = parse_lengths("--input-tokens", text), Random(1)
    return [lengths.draw(random) for _ in range(count)]


def test_one_number() -> None:
    assert set(drawn("128")) == {128}


def test_a_range_has_both_ends() -> None:
    values = drawn("3..6")
    assert set(values) == {3, 4, 5, 6}


def test_normal_has_its_mean_and_no_length_below_1() -> None:
    values = drawn("normal:100,20")
    assert mean(values) == pytest.approx(100, rel=0.03)
    assert 15 < (mean((value - 100) ** 2 for value in values)) ** 0.5 < 25
    assert min(drawn("normal:2,50")) == 1


def test_lognormal_has_its_median() -> None:
    values = drawn("lognormal:128,0.5")
    assert median(values) == pytest.approx(128, rel=0.05)
    assert mean(values) > median(values)
    assert max(drawn("lognormal:1000000,5")) == MAX_TOKENS


def test_weights_are_shares() -> None:
    values = drawn("100*3,1500*1")
    assert set(values) == {100, 1500}
    assert values.count(100) / len(values) == pytest.approx(0.75, abs=0.03)


def test_the_same_seed_draws_the_same() -> None:
    assert drawn("lognormal:128,0.5", 10) == drawn("lognormal:128,0.5", 10)


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "1.5", "5..2", "1..2..3", "normal:5", "normal:0,1", "normal:5,-1", "normal:5,nan",
     "gamma:1,2", "lognormal:5,11", "5*0", "5*x", "5*1,6", "1000001", "5*nan"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--input-tokens is "):
        parse_lengths("--input-tokens", text)


def test_the_error_says_what_is_out_of_range() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\(5 is above 2\)"):
        parse_lengths("--input-tokens", "5..2")
