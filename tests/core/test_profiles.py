"""The profiles file: what is read, what is refused and how that is said."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.profile_switch import SwitchRule
from pageferry.core.profiles import INTERACTIVE, QUALITY, THROUGHPUT, Profile, ProfileSet, is_accepted, parse_profiles


def test_without_a_file_there_are_three_and_the_default_changes_nothing() -> None:
    profiles = parse_profiles("", "file")
    assert profiles == ProfileSet()
    assert list(profiles.profiles) == ["interactive", "throughput", "quality"]
    assert profiles.profiles[profiles.default] == Profile("interactive")
    assert [INTERACTIVE.priority_of(own) for own in (-7, 0, 7)] == [-7, 0, 7]


def test_all_fields_are_read() -> None:
    text = """
    default = "vip"

    [profiles.vip]
    priority = -10
    min_priority = -20
    max_running = 4
    batch_window_ms = 5
    batch_size = 2
    speculation = false
    page_formats = ["bf16", "k=int8,v=int4:asym"]
    ttft_slo_ms = 500
    token_slo_ms = 50.5
    reserved_seqs = 3

    [[profiles.vip.switch]]
    use = "interactive"
    busy_above = 0.9
    busy_below = 0.5
    for_s = 10
    """
    rule = SwitchRule("interactive", busy_above=0.9, busy_below=0.5, for_s=10.0)
    expected = Profile(
        "vip", -10, -20, 4, 5.0, 2, False, ("bf16", "k=int8,v=int4:asym"), 500.0, 50.5, 3, switches=(rule,)
    )
    profiles = parse_profiles(text, "file")
    assert (profiles.default, profiles.profiles["vip"]) == ("vip", expected)


def test_a_table_changes_a_built_in_profile_and_one_may_start_from_another() -> None:
    text = "[profiles.throughput]\nmax_running = 8\n[profiles.night]\nbase = 'throughput'\nmax_running = 64"
    profiles = parse_profiles(text, "file").profiles
    assert profiles["throughput"].max_running == 8
    assert profiles["throughput"].priority == profiles["night"].priority == THROUGHPUT.priority
    assert (profiles["night"].name, profiles["night"].max_running) == ("night", 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profiles", "file: is no TOML that can be read"),
        ("a = " + "[" * 100_000, "file: is no TOML that can be read"),
        ("[server]\nport = 1", "file: 'server' is not known; profiles are"),
        ("profiles = 1", "profiles must be tables"),
        ("[profiles]\nvip = 1", "profiles must be tables"),
        ("default = 'vip'", "file: default is 'vip', must be one of interactive, throughput, quality"),
        ("default = 1", "file: default is 1, must be one of"),
        ("[profiles.'a b']", "name is 'a b', must be 1 to 64 letters"),
        ("[profiles.a]\nname = 'b'", "'name' is not known, but priority"),
        ("[profiles.a]\nmax_runing = 1", "'max_runing' is not known, but priority, min_priority, max_running"),
        ("[profiles.a]\nbase = 'b'", "base is 'b', must be one of interactive"),
        ("[profiles.a]\nmax_running = -1", "max_running is -1, must be from 0 to"),
        ("[profiles.a]\nmax_running = true", "max_running is True, must be a whole number"),
        ("[profiles.a]\npriority = 2147483648", "priority is 2147483648, must be from"),
        ("[profiles.a]\nttft_slo_ms = nan", "ttft_slo_ms is nan, must be from 0"),
        ("[profiles.a]\nspeculation = 1", "speculation is 1, must be true or false"),
        ("[profiles.a]\npage_formats = ['int3']", "'int3', must be one of fp32, bf16"),
        ("[profiles.a]\npage_formats = [1]", "page_formats is .*, must be a list of texts"),
        ("[profiles.a]\nswitch = 1", r"switch must be a list of tables, \[\[profiles.a.switch\]\]"),
        ("[[profiles.a.switch]]\nuse = 'b'\nhours = '22:00-06:00'", "use is 'b', must be one of interactive"),
        ("[[profiles.a.switch]]\nhours = '22:00-06:00'", "switch 1: use is '', must name a profile"),
        ("[[profiles.a.switch]]\nuse = 'quality'", "one of them must be set"),
        ("[[profiles.a.switch]]\nuse = 'quality'\nqueue = 1", "switch 1: 'queue' is not known, but use"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        parse_profiles(text, "file")
    assert caught.value.reason == "BAD_PROFILES"


def test_the_documented_file_is_read() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "profiles.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(# profiles.toml\n.*?)```", text, re.DOTALL)
    profiles = parse_profiles(example, "docs/profiles.md")
    documented = {line.split("=")[0].strip() for line in example.splitlines() if "=" in line}
    fields = {one.name for kind in (Profile, SwitchRule) for one in dataclasses.fields(kind)}
    assert documented | {"name", "switches"} == fields | {"default", "base"}
    assert [rule.use for rule in profiles.profiles["throughput"].switches] == ["night", "overload"]


def test_there_are_not_too_many() -> None:
    text = "".join(f"[profiles.p{number}]\n" for number in range(62))
    with pytest.raises(InvalidArgumentError, match="there are 65 profiles, the limit is 64"):
        parse_profiles(text, "file")


def test_a_request_stays_within_its_class() -> None:
    assert [THROUGHPUT.priority_of(own) for own in (-(2**31), -100, 0, 5)] == [1, 1, 100, 105]
    assert Profile("a", priority=-(2**31)).priority_of(-5) == -(2**31)
    assert Profile("a", priority=2**31 - 1).priority_of(5) == 2**31 - 1


@pytest.mark.parametrize(
    ("page_format", "accepted", "expected"),
    [
        ("int8", (), True),
        ("int8", QUALITY.page_formats, False),
        ("bf16", QUALITY.page_formats, True),
        ("k=bf16,v=fp16", QUALITY.page_formats, True),
        ("k=bf16,v=int8", QUALITY.page_formats, False),
        ("k=bf16,v=int8", ("k=bf16,v=int8",), True),
        ("int8:channel", ("int8",), False),
    ],
)
def test_formats_that_are_accepted(page_format: str, accepted: tuple[str, ...], expected: bool) -> None:
    assert is_accepted(PageFormat.parse(page_format), Profile("a", page_formats=accepted).formats) is expected


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_profiles(text, "file")
    except InvalidArgumentError as error:
        assert error.message.startswith("file: ")
