"""When requests are sent, in seconds from the start of a run; pure, and the same for the same seed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.lengths import MAX_TOKENS


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average; of one seed, at two rates the same ones in another measure."""
    random = Random(seed)
    at_s = 0.0
    while True:
        at_s += random.expovariate(1.0) / rate
        yield at_s


def constant(rate: float) -> Iterator[float]:
    index = 0
    while True:
        yield index / rate
        index += 1


ARRIVALS = ("poisson", "constant")


def arrivals(kind: str, rate: float, seed: int) -> Iterator[float]:
    """`kind` is one of ARRIVALS."""
    return poisson(rate, seed) if kind == "poisson" else constant(rate)


@dataclass(frozen=True, slots=True)
class Traced:
    """A request of a recorded trace; `at_s` counts from its first one."""

    at_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path, speed: float = 1.0) -> list[Traced]:
    """The requests of a file with one JSON object a line, earliest first; time runs `speed` times as fast.

    `timestamp_s` is in seconds, `timestamp` in milliseconds; lengths are `input_tokens` and `output_tokens`, or
    `input_length` and `output_length`. Other fields are skipped. Raises InvalidArgumentError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"--replay: {path} can't be read: {reason}") from None
    traced = [_traced(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not traced:
        raise InvalidArgumentError(f"--replay: {path} holds no request")
    traced.sort(key=lambda request: request.at_s)
    first_s = traced[0].at_s
    return [Traced((request.at_s - first_s) / speed, request.input_tokens, request.output_tokens) for request in traced]


def _traced(line: str, where: str) -> Traced:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"--replay: {where} is no JSON object")
    at_s = _number(fields, where, "timestamp_s", "timestamp") / (1.0 if "timestamp_s" in fields else 1000.0)
    counts = [_number(fields, where, f"{side}_tokens", f"{side}_length") for side in ("input", "output")]
    for side, count in zip(("input", "output"), counts, strict=True):
        if count != int(count) or not 1 <= count <= MAX_TOKENS:
            limit = f"must be a whole number from 1 to {MAX_TOKENS}"
            raise InvalidArgumentError(f"--replay: {where}: {side} tokens is {count:g}, {limit}")
    return Traced(at_s, int(counts[0]), int(counts[1]))


def _number(fields: dict[str, object], where: str, *names: str) -> float:
    """Of the first of these fields that is there."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
                raise InvalidArgumentError(f"--replay: {where}: {name} must be a number")
            return float(value)
    raise InvalidArgumentError(f"--replay: {where} has no {' or '.join(names)}")
