"""When an engine counts as stalled, by what is seen of it."""

import pytest

from pageferry.runtime.watchdog import BUSY_FACTOR, Sign, Watchdog

STALL_S = 8.0


class Seen:
    """An engine as the watchdog sees it, look by look."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(STALL_S)
        self.num_turns, self.cpu_s = 0, 0.0
        self.look()

    def look(self, *, turns: int = 0, cpu_s: float | None = 0.0, has_work: bool = True) -> bool:
        self.num_turns += turns
        self.cpu_s += cpu_s or 0.0
        sign = Sign(self.num_turns, has_work, None if cpu_s is None else self.cpu_s)
        self.watchdog.look(sign, self.watchdog.look_s)
        return self.watchdog.stalled

    def stalled_after(self, most_s: float, **look: object) -> float | None:
        """Seconds of looks that are all the same until it counts as stalled."""
        for number in range(1, int(most_s / self.watchdog.look_s) + 1):
            if self.look(**look):  # type: ignore[arg-type]
                return number * self.watchdog.look_s
        return None


def test_an_engine_that_stands_still_with_work_is_stalled_in_time_and_not_before() -> None:
    assert Seen().stalled_after(60) == STALL_S


def test_one_turn_is_progress_and_ends_a_stall() -> None:
    seen = Seen()
    assert seen.stalled_after(7.5) is None
    assert not seen.look(turns=1)
    assert seen.stalled_after(7.5) is None
    assert seen.stalled_after(1) == 0.5
    assert not seen.look(turns=1)


def test_without_work_nothing_is_expected() -> None:
    seen = Seen()
    assert seen.stalled_after(600, has_work=False) is None
    assert seen.stalled_after(60) == STALL_S, "from the moment on that there is some"


@pytest.mark.field("kserve/kserve#6259", "vllm-project/vllm#36451", "gonka-ai/gonka#1421")
def test_a_step_that_computes_for_a_minute_is_no_stall_however_small_its_share_of_the_core() -> None:
    for share in (1.0, 0.01):
        assert Seen().stalled_after(60, cpu_s=share * STALL_S / 16) is None


def test_a_step_that_computes_for_ever_is_one_in_the_end() -> None:
    assert Seen().stalled_after(10_000, cpu_s=0.5) == STALL_S * BUSY_FACTOR


def test_a_thread_that_only_polls_is_stalled() -> None:
    assert Seen().stalled_after(60, cpu_s=0.0001) == STALL_S


def test_where_computing_cannot_be_seen_only_the_long_limit_holds() -> None:
    assert Seen().stalled_after(10_000, cpu_s=None) == STALL_S * BUSY_FACTOR


def test_a_pause_of_the_whole_process_is_not_held_against_the_engine() -> None:
    seen = Seen()
    seen.watchdog.look(Sign(0, has_work=True, cpu_s=0.0), 3600.0)
    assert not seen.watchdog.stalled
