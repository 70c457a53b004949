"""Who was disturbed when: what is wrong with a request that met a fault may be the fault's doing."""

import math
import time
from dataclasses import dataclass

SETTLE_S = 4.0  # after a fault is set right, until connections are back and spans held up have come


@dataclass(slots=True)
class _Spell:
    who: str
    began: float
    ended: float = math.inf


class Trouble:
    """Spells of disturbance; times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._spells: list[_Spell] = []

    def begin(self, who: str) -> _Spell:
        """The caller passes it to `end` once all is well again."""
        spell = _Spell(who, time.monotonic())
        self._spells.append(spell)
        return spell

    def end(self, spell: _Spell) -> None:
        spell.ended = time.monotonic()

    def is_in(self, who: str) -> bool:
        """Whether something is wrong with it now."""
        return any(spell.who == who and spell.ended == math.inf for spell in self._spells)

    def between(self, began: float, ended: float) -> set[str]:
        """Who was disturbed at some time between, or had only just been."""
        return {spell.who for spell in self._spells if spell.began <= ended and spell.ended + SETTLE_S >= began}
