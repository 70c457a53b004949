import json
from pathlib import Path
from typing import Any

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.lengths import parse_lengths
from pageferry.loadgen.load import Load, parse_duration, parse_rate_range, parse_slo
from pageferry.loadgen.result import Slo

SLO = Slo(500.0, None, None)


def load(**options: Any) -> Load:
    return Load(parse_lengths("--input-tokens", "16"), parse_lengths("--output-tokens", "4..8"), **options)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "closed"),
        ({"concurrency": 4}, "closed"),
        ({"rate": 2.0}, "open"),
        ({"replay": Path("a")}, "replay"),
        ({"find_goodput": True, "slo": SLO}, "goodput"),
    ],
)
def test_the_mode_follows_from_the_options(options: dict[str, Any], mode: str) -> None:
    assert load(**options).mode == mode


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"requests": 0}, "--requests is 0, must be from 1"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"duration_s": 0.0}, "--duration is 0.0"),
        ({"max_concurrency": 0, "rate": 1.0}, "--max-concurrency is 0"),
        ({"goodput_share": 1.5, "find_goodput": True, "slo": SLO}, "--goodput-share is 1.5"),
        ({"arrivals": "even", "rate": 1.0}, "--arrivals is 'even', must be poisson or constant"),
        ({"rate": 1.0, "concurrency": 1}, "exclude each other"),
        ({"rate": 1.0, "replay": Path("a")}, "exclude each other"),
        ({"find_goodput": True}, "--find-goodput needs --slo"),
        ({"arrivals": "constant"}, "--arrivals needs --rate or --find-goodput"),
        ({"max_concurrency": 2}, "--max-concurrency needs --rate or --replay"),
        ({"max_concurrency": 2, "find_goodput": True, "slo": SLO}, "--max-concurrency needs --rate or --replay"),
        ({"speed": 2.0, "rate": 1.0}, "--speed needs --replay"),
        ({"prefixes": 2}, "--prefixes needs --prefix-tokens"),
        ({"goodput_share": 0.5}, "--goodput-share needs --find-goodput"),
        ({"rate_range": (1.0, 2.0)}, "--rate-range needs --find-goodput"),
    ],
)
def test_options_out_of_range_or_at_odds(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load(**options)
    assert problem in caught.value.message


def test_as_given_is_json() -> None:
    given = load(find_goodput=True, slo=SLO, rate_range=(1.0, 8.0)).as_given()
    assert json.loads(json.dumps(given)) == given
    assert given["output_tokens"] == "4..8" and given["rate_range"] == [1.0, 8.0]
    assert given["slo"] == {"ttft_ms": 500.0, "itl_ms": None, "e2e_ms": None}
    assert load(replay=Path("a/b")).as_given()["replay"] == "a/b"


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("2m", 120), ("1h", 3600), ("1.5", 1.5), (" 7 s", 7)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--duration", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5x", "5mm", "1s2"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--duration is "):
        parse_duration("--duration", text)


def test_limits() -> None:
    assert parse_slo("ttft=500ms,itl=50ms,e2e=10s") == Slo(500, 50, 10_000)
    assert parse_slo("e2e=1s") == Slo(None, None, 1000)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=5", "ttft=0ms", "ttft=-1s", "foo=1s", "ttft=1s,ttft=2s"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--slo"):
        parse_slo(text)


def test_rate_ranges() -> None:
    assert parse_rate_range("0.5..64") == (0.5, 64.0)
    for text in ("", "1", "2..1", "0..1", "1..nan", "1..2..3"):
        with pytest.raises(InvalidArgumentError, match="--rate-range"):
            parse_rate_range(text)
