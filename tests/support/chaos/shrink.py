"""A shorter script that still fails: the time around the failure first, then fewer faults, then fewer requests."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from chaos.script import Script

Fails = Callable[[Script], Awaitable[bool]]
T = TypeVar("T")
LEAD_S = (15.0, 60.0, 240.0)  # how long before the failure its cause may lie
TAIL_S = 5.0


class Budget:
    """Replays that may still be made; a script counts as one that doesn't fail once they are spent."""

    def __init__(self, fails: Fails, num_replays: int) -> None:
        self._fails = fails
        self.num_left = num_replays

    async def fails(self, script: Script) -> bool:
        if not self.num_left:
            return False
        self.num_left -= 1
        return await self._fails(script)


async def shrink(script: Script, failed_at_s: float | None, fails: Fails, *, num_replays: int) -> Script:
    """The shortest script found that fails, within so many replays; `script` itself where no shorter one does.

    `failed_at_s` is when something was first seen to be wrong, None where it was only once all was over.
    """
    budget = Budget(fails, num_replays)
    script = await _nearer(script, failed_at_s, budget)
    faults = await fewest(script.faults, lambda faults: budget.fails(replace(script, faults=tuple(faults))))
    script = replace(script, faults=tuple(faults))
    asks = await fewest(script.asks, lambda asks: budget.fails(replace(script, asks=tuple(asks))))
    return replace(script, asks=tuple(asks))


async def _nearer(script: Script, failed_at_s: float | None, budget: Budget) -> Script:
    """The script without what came long before the failure, and after it."""
    end_s = script.seconds if failed_at_s is None else min(script.seconds, failed_at_s + TAIL_S)
    for lead_s in LEAD_S:
        start_s = max(0.0, end_s - TAIL_S - lead_s)
        part = script.between(start_s, end_s)
        if start_s > 0 and await budget.fails(part):
            return part
    return script


async def fewest(items: Sequence[T], still: Callable[[list[T]], Awaitable[bool]]) -> list[T]:
    """Items, in order, with which it is still so, and none of whose parts could be left out (delta debugging)."""
    kept, num_parts = list(items), 1
    while kept:
        bounds = [len(kept) * part // num_parts for part in range(num_parts + 1)]
        for low, high in pairwise(bounds):
            rest = kept[:low] + kept[high:]
            if high > low and await still(rest):
                kept, num_parts = rest, max(1, num_parts - 1)
                break
        else:
            if num_parts >= len(kept):
                break
            num_parts = min(len(kept), 2 * num_parts)
    return kept
