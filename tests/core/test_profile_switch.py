"""Profiles that switch by load and by the time of day."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, strategies as st

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.profile_switch import Reading, Switch, SwitchRule, in_effect

QUEUED = SwitchRule("busy", queued_above=10, queued_below=3)


def reading(now: float = 0.0, *, queued: int = 0, busy: float = 0.0, wall_s: float = 0.0) -> Reading:
    return Reading(queued, busy, wall_s, now)


def scenario(rule: SwitchRule, *readings: Reading) -> str:
    """Whether the rule is on after each reading, as `-` and `+`."""
    switch, marks = Switch(rule), ""
    for one in readings:
        switch.look(one)
        marks += "+" if switch.is_on else "-"
    return marks


def by_queue(rule: SwitchRule, *lengths: int) -> str:
    """One reading a second."""
    return scenario(rule, *(reading(float(second), queued=length) for second, length in enumerate(lengths)))


def test_between_the_bounds_it_stays_as_it_is() -> None:
    assert by_queue(QUEUED, 0, 10, 11, 10, 3, 2, 3, 10, 11) == "--+++---+"


def test_it_takes_its_time_both_ways_and_a_moment_in_between_starts_over() -> None:
    rule = SwitchRule("busy", queued_above=10, queued_below=3, for_s=2)
    assert by_queue(rule, 11, 11, 11, 11) == "--++"
    assert by_queue(rule, 11, 11, 10, 11, 11, 11) == "-----+"
    assert by_queue(rule, 11, 11, 11, 0, 0, 5, 0, 0, 0) == "--++++++-"


def test_by_the_share_of_slots() -> None:
    rule = SwitchRule("busy", busy_above=0.9, busy_below=0.5)
    assert scenario(rule, *(reading(busy=share) for share in (0.9, 0.95, 0.5, 0.45, 0.9))) == "-++--"


@pytest.mark.parametrize(
    ("zone", "hours", "moments", "expected"),
    [
        ("UTC", "08:00-18:00", ("07:59", "08:00", "17:59", "18:00"), "-++-"),
        ("UTC", "22:00-06:00", ("21:59", "22:00", "23:59", "00:00", "05:59", "06:00"), "-++++-"),
        ("+05:30", "08:00-18:00", ("02:29", "02:30", "12:29", "12:30"), "-++-"),
        ("-03:00", "22:00-06:00", ("00:59", "01:00", "08:59", "09:00"), "-++-"),
    ],
)
def test_by_the_time_of_day(zone: str, hours: str, moments: tuple[str, ...], expected: str) -> None:
    rule = SwitchRule("night", hours=hours, timezone=zone)
    walls = [datetime.fromisoformat(f"2026-01-15T{moment}:00+00:00").timestamp() for moment in moments]
    assert scenario(rule, *(reading(wall_s=wall_s) for wall_s in walls)) == expected


def test_a_named_zone_follows_its_summer_time() -> None:
    pytest.importorskip("zoneinfo")
    rule = SwitchRule("day", hours="08:00-09:00", timezone="Europe/Berlin")
    winter, summer = (datetime(2026, month, 15, 6, 30, tzinfo=UTC).timestamp() for month in (1, 7))
    assert [rule.wants(reading(wall_s=wall_s)) for wall_s in (winter, winter + 3600, summer)] == [False, True, True]


def test_the_first_rule_that_is_on_wins_and_is_not_followed_further() -> None:
    switches = [Switch(SwitchRule("night", hours="22:00-06:00")), Switch(QUEUED)]
    assert in_effect("own", switches) == "own"
    switches[1].is_on = True
    assert in_effect("own", switches) == "busy"
    switches[0].is_on = True
    assert in_effect("own", switches) == "night"


@given(st.lists(st.integers(0, 20), max_size=60))
def test_it_never_switches_within_the_bounds(lengths: list[int]) -> None:
    marks = "-" + by_queue(QUEUED, *lengths)
    for before, after, length in zip(marks, marks[1:], lengths, strict=False):
        assert before == after or (length > 10 if after == "+" else length < 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use": ""}, "use is '', must name a profile"),
        ({"use": "a"}, "one of them must be set"),
        ({"use": "a", "queued_above": 2, "queued_below": 1, "hours": "01:00-02:00"}, "and one only"),
        ({"use": "a", "queued_above": 2}, "queued_below is 0, must be from 1 to queued_above, 2"),
        ({"use": "a", "queued_above": 2, "queued_below": 3}, "queued_below is 3"),
        ({"use": "a", "busy_above": 0.5, "busy_below": 0.6}, "busy_below is 0.6"),
        ({"use": "a", "busy_above": 1.5, "busy_below": 0.6}, "busy_below is 0.6, must be above 0"),
        ({"use": "a", "busy_above": float("nan"), "busy_below": 0.5}, "busy_below"),
        ({"use": "a", "hours": "24:00-06:00"}, "must be HH:MM-HH:MM"),
        ({"use": "a", "hours": "06:00-06:00"}, "two times that differ"),
        ({"use": "a", "hours": "01:00-02:00", "timezone": "Mars/Olympus"}, "timezone is 'Mars/Olympus'"),
        ({"use": "a", "hours": "01:00-02:00", "timezone": "../etc"}, "timezone is '../etc'"),
        ({"use": "a", "hours": "01:00-02:00", "for_s": -1.0}, "for_s is -1.0"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SwitchRule(**fields)  # type: ignore[arg-type]
