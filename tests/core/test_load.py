import pytest

from pageferry.core.load import MAX_REPORT_S, MIN_REPORT_S, ReportTimer, Smoothed


def test_the_first_sample_counts_whole_and_later_ones_by_their_weight() -> None:
    figure = Smoothed(weight=0.5)
    assert figure.value == 0
    figure.add(8)
    assert figure.value == 8
    figure.add(4)
    assert figure.value == 6
    figure.add(2, share=0.25)
    assert figure.value == 5.5


def test_a_report_is_due_at_once_then_soon_after_a_change_and_in_any_case_later() -> None:
    timer, now = ReportTimer(), 100.0
    assert timer.take(now)
    assert not timer.take(now)
    assert timer.wait(now) == MAX_REPORT_S
    timer.mark_changed()
    assert timer.wait(now) == pytest.approx(MIN_REPORT_S)
    assert not timer.take(now + MIN_REPORT_S / 2)
    assert timer.take(now + MIN_REPORT_S)
    assert timer.wait(now + MIN_REPORT_S) == pytest.approx(MAX_REPORT_S)
    assert timer.take(now + MIN_REPORT_S + MAX_REPORT_S)
