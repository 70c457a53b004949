import pytest

from pageferry.core.errors import FailedPreconditionError
from pageferry.core.handoff_tables import SenderState
from pageferry.core.layout import PageKey
from pageferry.core.sender import HandoffStats, Sender


def shipping() -> Sender:
    sender = Sender()
    sender.open()
    sender.ship(PageKey(0, 0))
    return sender


def test_a_push_of_two_pages_hidden_behind_compute() -> None:
    sender = Sender()
    sender.open()
    sender.ship(PageKey(0, 3))
    sender.sent(100, now=1.0)
    sender.sent(20, now=2.0)
    assert sender.num_in_flight == 2
    sender.acked(1, now=3.0)
    sender.acked(2, now=4.0)  # 3 s with a frame in flight, then none
    sender.compute_ended(now=6.0)
    sender.ship(PageKey(0, 4))
    sender.sent(100, now=6.0)
    sender.acked(3, now=6.5)
    sender.commit()
    sender.committed(now=7.0)
    assert sender.state is SenderState.COMMITTED
    assert sender.stats == HandoffStats(pages=2, bytes=220, tail_s=1.0, in_flight_s=3.5)
    assert sender.stats.hidden == pytest.approx(1 - 1.0 / 3.5)


def test_an_answered_commit_acknowledges_all_frames() -> None:
    sender = shipping()
    sender.sent(10, now=0.0)
    sender.compute_ended(now=0.0)
    sender.commit()
    sender.committed(now=2.0)
    assert sender.num_in_flight == 0
    assert sender.stats == HandoffStats(pages=1, bytes=10, tail_s=2.0, in_flight_s=2.0)
    assert sender.stats.hidden == 0.0


@pytest.mark.parametrize(("tail_s", "in_flight_s", "hidden"), [(0.0, 0.0, 1.0), (1.0, 0.5, 0.0), (0.25, 1.0, 0.75)])
def test_the_hidden_share_is_between_0_and_1(tail_s: float, in_flight_s: float, hidden: float) -> None:
    assert HandoffStats(1, 1, tail_s, in_flight_s).hidden == hidden


def test_figures_are_of_committed_pushes_only() -> None:
    sender = shipping()
    sender.compute_ended(now=0.0)
    sender.commit()
    with pytest.raises(AssertionError, match="the push is committing: its figures are not complete"):
        _ = sender.stats


@pytest.mark.parametrize("num_frames", [0, 3])
def test_an_acknowledgement_that_cannot_be_is_refused(num_frames: int) -> None:
    sender = shipping()
    sender.sent(10, now=0.0)
    sender.sent(10, now=0.0)
    sender.acked(1, now=1.0)
    with pytest.raises(FailedPreconditionError, match=f"acked.frames is {num_frames}, must be from 1 to 2"):
        sender.acked(num_frames, now=2.0)
    sender.acked(1, now=2.0)
    assert sender.num_in_flight == 1


def test_a_page_is_shipped_once_and_only_while_the_push_is_open() -> None:
    with pytest.raises(AssertionError, match="push is idle and has no ship"):
        Sender().ship(PageKey(0, 0))
    sender = shipping()
    with pytest.raises(AssertionError, match="page 0 of group 0 is shipped twice"):
        sender.ship(PageKey(0, 0))
    sender.commit()
    with pytest.raises(AssertionError, match="push is committing and has no ship"):
        sender.ship(PageKey(0, 1))


def test_a_push_without_pages_is_not_committed() -> None:
    sender = Sender()
    sender.open()
    with pytest.raises(AssertionError, match="push is opened and has no commit"):
        sender.commit()


def test_a_receiver_out_of_turn_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match="push is idle: acked is refused"):
        Sender().acked(0, now=0.0)
    sender = shipping()
    with pytest.raises(FailedPreconditionError, match="push is shipping: opened is refused"):
        sender.open()
    with pytest.raises(FailedPreconditionError, match="push is shipping: committed is refused"):
        sender.committed(now=0.0)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_after_an_abort_everything_is_late_and_nothing_is_a_mistake(num_steps: int) -> None:
    sender = Sender()
    for step in (sender.open, lambda: sender.ship(PageKey(0, 0)), sender.commit)[:num_steps]:
        step()
    sender.abort()
    sender.abort()
    assert sender.state is SenderState.ABORTED
    late = (
        sender.open,
        lambda: sender.ship(PageKey(0, 1)),
        lambda: sender.acked(0, now=0.0),
        sender.commit,
        lambda: sender.committed(now=0.0),
    )
    for event in late:
        with pytest.raises(FailedPreconditionError, match="push is aborted"):
            event()


def test_a_committed_push_stays_committed() -> None:
    sender = shipping()
    sender.commit()
    sender.committed(now=0.0)
    sender.abort()
    assert sender.state is SenderState.COMMITTED
