"""How fast a line moves, only counting the time in which somebody stands in it."""

import pytest

from pageferry.router.pace import Pace, retry_ms


def moving(gap_s: float, num: int = 10) -> Pace:
    pace = Pace()
    pace.waits(0)
    for index in range(1, num + 1):
        pace.goes(index * gap_s, num_left=num - index)
    return pace


def test_the_gap_is_that_between_those_who_go() -> None:
    assert Pace().gap_s is None
    assert moving(0.5, 2).gap_s is None, "too few"
    assert moving(0.5).gap_s == pytest.approx(0.5)


def test_bursts_are_averaged() -> None:
    pace = Pace()
    pace.waits(0)
    for index in range(400):
        pace.goes(float(index // 4), num_left=5)
    assert pace.gap_s == pytest.approx(0.25, rel=0.2)


def test_time_without_a_line_does_not_count() -> None:
    pace = moving(0.5)  # empty now
    pace.goes(1000.0, num_left=0)  # it came and went at once
    assert pace.gap_s == pytest.approx(0.5)
    pace.waits(2000.0)
    pace.empties()  # it gave up
    pace.goes(3000.0, num_left=0)
    assert pace.gap_s == pytest.approx(0.5)
    pace.waits(4000.0)
    pace.goes(4000.5, num_left=0)
    assert pace.gap_s == pytest.approx(0.5)


@pytest.mark.parametrize(("wait_s", "told_ms"), [(None, 1000), (0.0, 50), (0.0004, 50), (1.25, 1250), (1e9, 60_000)])
def test_when_to_come_again(wait_s: float | None, told_ms: int) -> None:
    assert retry_ms(wait_s) == told_ms
