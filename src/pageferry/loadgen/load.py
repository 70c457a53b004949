"""What load is put on a server: the options of a run, checked."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.loadgen.arrivals import ARRIVALS
from pageferry.loadgen.lengths import Lengths
from pageferry.loadgen.result import Slo

DEFAULT_REQUESTS = 64
_MAX_COUNT = 10_000_000
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Mode = Literal["closed", "open", "replay", "goodput"]


@dataclass(frozen=True, slots=True)
class Load:
    """Raises InvalidArgumentError for a value out of range, and for options that exclude each other.

    A run ends with `requests` sent, or once `duration_s` has passed since its start; requests in flight then still
    end. For `find_goodput` both are at least what each trial has.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 1
    concurrency: int | None = None
    rate: float | None = None
    arrivals: str | None = None
    max_concurrency: int | None = None
    replay: Path | None = None
    speed: float | None = None
    prefix_tokens: int = 0
    prefixes: int | None = None
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 120.0
    slo: Slo | None = None
    find_goodput: bool = False
    goodput_share: float | None = None
    rate_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        if sum((self.concurrency is not None, self.rate is not None, self.replay is not None, self.find_goodput)) > 1:
            raise InvalidArgumentError("--concurrency, --rate, --replay and --find-goodput exclude each other")
        if self.find_goodput and self.slo is None:
            raise InvalidArgumentError("--find-goodput needs --slo, the limits that requests are to keep")
        for name, needed, there in (
            ("arrivals", "--rate or --find-goodput", self.mode in ("open", "goodput")),
            ("max_concurrency", "--rate or --replay", self.mode in ("open", "replay")),
            ("speed", "--replay", self.mode == "replay"),
            ("prefixes", "--prefix-tokens", self.prefix_tokens > 0),
            ("goodput_share", "--find-goodput", self.find_goodput),
            ("rate_range", "--find-goodput", self.find_goodput),
        ):
            if getattr(self, name) is not None and not there:
                raise InvalidArgumentError(f"{_option(name)} needs {needed}")

    @property
    def mode(self) -> Mode:
        if self.find_goodput:
            return "goodput"
        if self.replay is not None:
            return "replay"
        return "open" if self.rate is not None else "closed"

    def as_given(self) -> dict[str, object]:
        """All options by name, as JSON can hold them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["slo"] = None if self.slo is None else dataclasses.asdict(self.slo)
        fields["rate_range"] = None if self.rate_range is None else list(self.rate_range)
        return {name: str(value) if isinstance(value, Lengths | Path) else value for name, value in fields.items()}

    def _check_ranges(self) -> None:
        for name, low, high in (
            ("requests", 1, _MAX_COUNT),
            ("warmup", 0, _MAX_COUNT),
            ("concurrency", 1, 100_000),
            ("max_concurrency", 1, 100_000),
            ("prefix_tokens", 0, _MAX_COUNT),
            ("prefixes", 1, _MAX_COUNT),
            ("temperature", 0, 100),
            ("seed", 0, 2**63 - 1),
            ("goodput_share", 0.01, 1),
            ("duration_s", 0.001, 1e6),
            ("timeout_s", 0.001, 1e6),
            ("rate", 0.001, 1e5),
            ("speed", 0.001, 1e6),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN is in no range
                raise invalid(_option(name), value, f"must be from {low:g} to {high:g}")
        if self.arrivals is not None and self.arrivals not in ARRIVALS:
            raise invalid("--arrivals", self.arrivals, f"must be {' or '.join(ARRIVALS)}")


def parse_duration(name: str, text: str) -> float:
    """Seconds of `500ms`, `30s`, `2m` or `1h`; a bare number is seconds."""
    number = text.strip().rstrip("mhs")
    unit = text.strip()[len(number) :] or "s"
    try:
        return float(number) * _UNITS_S[unit]
    except (ValueError, KeyError):
        raise invalid(name, text, "must be a number with ms, s, m or h") from None


def parse_slo(text: str) -> Slo:
    """Of `ttft=500ms,itl=50ms,e2e=10s`; one limit is enough."""
    limits_ms: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("ttft", "itl", "e2e") or not equals or name in limits_ms:
            raise invalid("--slo", text, "must be ttft=500ms,itl=50ms,e2e=10s, or some of them, each once")
        if value[-1:].isdigit():  # seconds or milliseconds? A limit is easily a thousand times off
            raise invalid("--slo", text, f"needs a unit for {name}: ms, s, m or h")
        limits_ms[name] = parse_duration(f"--slo {name}", value) * 1000
        if not 0 < limits_ms[name] < math.inf:
            raise invalid("--slo", text, f"needs a time above 0 for {name}")
    return Slo(limits_ms.get("ttft"), limits_ms.get("itl"), limits_ms.get("e2e"))


def parse_rate_range(text: str) -> tuple[float, float]:
    """Of `0.5..64`, in requests a second."""
    try:
        low, high = map(float, text.split(".."))
    except ValueError:
        raise invalid("--rate-range", text, "must be LOW..HIGH") from None
    if not 0.001 <= low < high <= 1e5:
        raise invalid("--rate-range", text, "must rise, from at least 0.001 to at most 100000 requests/s")
    return low, high


def _option(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"
