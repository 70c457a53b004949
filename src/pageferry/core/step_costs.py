"""What a row more costs a step, from steps that were measured."""

import math
from dataclasses import dataclass

_SHORTER, _LONGER = 0.5, 0.05  # weights of a new measurement: what else the machine does only makes steps longer
_TRUSTED = 6  # measurements
_HALF_LIFE = 256  # steps after which what was not measured again counts half
_GUESS = 0.06  # of the shortest step, for a row, before there is anything to tell it from
_GUESS_WEIGHT = 0.01


@dataclass(slots=True)
class _Kind:
    """Steps of about as many rows."""

    rows: int
    seconds: float  # near the least
    last: int = 0  # which step was the last one
    count: int = 0

    def add(self, rows: int, seconds: float, number: int) -> None:
        self.rows, self.last, self.count = rows, number, self.count + 1
        self.seconds += (_SHORTER if seconds < self.seconds else _LONGER) * (seconds - self.seconds)

    def weight(self, number: int) -> float:
        return min(1.0, self.count / _TRUSTED) * math.exp2((self.last - number) / _HALF_LIFE)


class StepCosts:
    """A straight line through seconds by numbers of rows.

    Texts grow and batches change, so that what was measured long ago counts less.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        self._num_steps = 0
        self._line: tuple[float, float] | None = None  # at no rows, for each row

    def add(self, rows: int, seconds: float) -> None:
        self._num_steps += 1
        # Exact up to 8 rows, then eighths of powers of two.
        shift = max(0, rows.bit_length() - 4)
        kind = self._kinds.setdefault(rows >> shift << shift, _Kind(rows, seconds))
        kind.add(rows, seconds, self._num_steps)
        self._line = None

    def step_s(self, rows: int) -> float:
        """Of a step of so many rows; at least a little."""
        start, row_s = self._fitted()
        return start + row_s * rows

    @property
    def row_s(self) -> float:
        return self._fitted()[1]

    def _fitted(self) -> tuple[float, float]:
        """By weighted least squares, with a guess of the slope that any two kinds of steps outweigh."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        if not self._kinds:
            return 1.0, _GUESS
        kinds = self._kinds.values()
        weights = [kind.weight(self._num_steps) for kind in kinds]
        total = sum(weights)
        rows = sum(w * kind.rows for w, kind in zip(weights, kinds, strict=True)) / total
        seconds = sum(w * kind.seconds for w, kind in zip(weights, kinds, strict=True)) / total
        shortest = min(kind.seconds for kind in kinds)
        up = sum(w * (k.rows - rows) * (k.seconds - seconds) for w, k in zip(weights, kinds, strict=True))
        across = sum(w * (k.rows - rows) ** 2 for w, k in zip(weights, kinds, strict=True))
        row_s = (up + _GUESS_WEIGHT * _GUESS * shortest) / (across + _GUESS_WEIGHT)
        row_s = min(max(row_s, 1e-3 * shortest), seconds / rows)  # a step of no rows takes no less than nothing
        return seconds - row_s * rows, row_s
