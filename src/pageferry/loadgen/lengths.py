"""How many tokens a request has: a distribution, as the command line names it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from pageferry.core.errors import invalid

MAX_TOKENS = 1_000_000
_FORMS = "must be N, LOW..HIGH, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA, or N*WEIGHT,N*WEIGHT"

_Draw = Callable[[Random], float]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 to MAX_TOKENS; draws beyond are cut to them."""

    text: str  # as it was given
    _draw: _Draw = field(repr=False, compare=False)

    def draw(self, random: Random) -> int:
        return max(1, min(MAX_TOKENS, round(self._draw(random))))

    def __str__(self) -> str:
        return self.text


def parse_lengths(name: str, text: str) -> Lengths:
    """Of the option `name`. Raises InvalidArgumentError."""
    try:
        return Lengths(text, _parse(text.strip()))
    except ValueError as error:
        problem = f" ({error})" if isinstance(error, _OutOfRangeError) else ""
        raise invalid(name, text, f"{_FORMS}{problem}") from None


class _OutOfRangeError(ValueError):
    """Says what is wrong; all other ValueErrors are of the form."""


def _parse(text: str) -> _Draw:
    kind, colon, rest = text.partition(":")
    if colon:
        return _continuous(kind, rest)
    if "*" in text:
        return _weighted(text)
    if ".." in text:
        low, high = map(_count, text.split(".."))
        if low > high:
            raise _OutOfRangeError(f"{low} is above {high}")
        return lambda random: random.randint(low, high)
    count = _count(text)
    return lambda random: count


def _continuous(kind: str, text: str) -> _Draw:
    middle_text, deviation_text = text.split(",")
    middle, deviation = _count(middle_text), float(deviation_text)
    if not 0 <= deviation <= MAX_TOKENS:
        raise _OutOfRangeError(f"the second number must be from 0 to {MAX_TOKENS}")
    if kind == "normal":
        return lambda random: random.gauss(middle, deviation)
    if kind != "lognormal":
        raise ValueError(kind)
    if deviation > 10:
        raise _OutOfRangeError("sigma must be at most 10")
    return lambda random: middle * random.lognormvariate(0.0, deviation)


def _weighted(text: str) -> _Draw:
    pairs = [part.split("*") for part in text.split(",")]
    counts, weights = [_count(count) for count, _ in pairs], [float(weight) for _, weight in pairs]
    if not all(0 < weight <= MAX_TOKENS for weight in weights):
        raise _OutOfRangeError(f"weights must be above 0 and at most {MAX_TOKENS}")
    return lambda random: random.choices(counts, weights)[0]


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MAX_TOKENS:
        raise _OutOfRangeError(f"{count} is not from 1 to {MAX_TOKENS}")
    return count
