"""Whether an engine's thread gets on, judged by what others see of it: a frozen thread tells nothing of itself."""

from dataclasses import dataclass

LOOKS = 16  # in the time after which a frozen engine is found out
BUSY_FACTOR = 40  # one step may compute so many times longer than a frozen engine is waited for
# A thread that computes gets more of a core than this, however crowded the machine; one that polls a lock, less.
_MIN_CPU_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class Sign:
    """What is seen of a thread at one moment."""

    num_turns: int  # steps and commands since its start
    has_work: bool  # False: only a command can bring some, and none is there
    cpu_s: float | None  # computed so far; None where the system doesn't tell


class Watchdog:
    """Judges a row of signs: with work to do, a thread gets on by its turns, or else is given time.

    `stall_s` while it does not even compute, since a long step is no fault; far more while it does. Time counts as far
    as the watcher itself was awake: after a pause of the whole process nothing is known yet.
    """

    def __init__(self, stall_s: float) -> None:
        self.silent_s = 0.0  # without a turn
        self._stall_s = stall_s
        self._idle_s = 0.0  # without a turn and without computing
        self._last: Sign | None = None

    @property
    def look_s(self) -> float:
        """How often to look."""
        return self._stall_s / LOOKS

    @property
    def stalled(self) -> bool:
        return self._idle_s >= self._stall_s or self.silent_s >= self._stall_s * BUSY_FACTOR

    def look(self, sign: Sign, elapsed_s: float) -> None:
        """Take a sign, so long after the one before."""
        last, self._last = self._last, sign
        elapsed_s = min(elapsed_s, 2 * self.look_s)
        if last is None or sign.num_turns != last.num_turns or not sign.has_work:
            self.silent_s = self._idle_s = 0.0
            return
        self.silent_s += elapsed_s
        self._idle_s = 0.0 if _computed(last, sign, elapsed_s) else self._idle_s + elapsed_s


def _computed(before: Sign, after: Sign, elapsed_s: float) -> bool:
    if before.cpu_s is None or after.cpu_s is None:
        return True
    return after.cpu_s - before.cpu_s > elapsed_s * _MIN_CPU_SHARE
