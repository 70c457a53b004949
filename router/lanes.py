"""How much of each profile is under way, and which of the requests that wait it holds back."""

import asyncio
from collections.abc import Callable, Collection, Mapping

from pageferry.core.profiles import Profile, is_accepted
from pageferry.router.ask import Ask, Grant
from pageferry.router.profiles import Profiles
from pageferry.router.states import num_free_slots
from pageferry.router.workers import Worker


class Lanes:
    """Counts by the profile that was asked for; limits are those of the one in effect."""

    def __init__(self, profiles: Profiles, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a batch's window has passed."""
        self._profiles = profiles
        self._on_change = on_change
        self._running: dict[str, set[Grant]] = {}
        self._batches: dict[str, dict[Ask, None]] = {}  # that gather

    def num_running(self, name: str) -> int:
        return len(self._running.get(name, ()))

    def join(self, ask: Ask) -> None:
        """A request has come; it may have to wait for company."""
        profile = self._profiles.now(ask.profile)
        if not profile.batch_window_ms:
            return
        ask.is_gathering = True
        batch = self._batches.setdefault(ask.profile.name, {})
        batch[ask] = None
        if len(batch) == 1:
            loop = asyncio.get_running_loop()
            loop.call_later(profile.batch_window_ms / 1000, self._end_window, ask.profile.name, batch)
        if 0 < profile.batch_size <= len(batch):
            self._open(ask.profile.name, batch)

    def leave(self, ask: Ask) -> None:
        """The request is over; idempotent."""
        self._batches.get(ask.profile.name, {}).pop(ask, None)

    def goes(self, ask: Ask, grant: Grant) -> None:
        """Count it until the grant is released."""
        grant.lane = self._running.setdefault(ask.profile.name, set())
        grant.lane.add(grant)

    def holds(self, ask: Ask) -> bool:
        """Whether its profile holds it back, whatever room there is."""
        most = self._profiles.now(ask.profile).max_running
        return ask.is_gathering or 0 < most <= self.num_running(ask.profile.name)

    def reserved(self, ask: Ask, workers: Collection[Worker]) -> set[Worker]:
        """Those of the workers whose free slots are kept for profiles that go before this request's."""
        own = self._profiles.now(ask.profile)
        lacking: dict[str, tuple[int, set[Worker]]] = {}
        for name, profile in self._profiles.in_effect().items():
            num_lacking = profile.reserved_seqs - self.num_running(name)
            if profile.priority < own.priority and num_lacking > 0:
                lacking[name] = num_lacking, _usable(profile, workers)
        return _kept(lacking)

    def _end_window(self, name: str, batch: dict[Ask, None]) -> None:
        if self._batches.get(name) is batch:
            self._open(name, batch)
            self._on_change()

    def _open(self, name: str, batch: dict[Ask, None]) -> None:
        del self._batches[name]
        for ask in batch:
            ask.is_gathering = False


def _usable(profile: Profile, workers: Collection[Worker]) -> set[Worker]:
    formats = profile.formats
    return {w for w in workers if w.view.layout is not None and is_accepted(w.view.layout.format, formats)}


def _kept(lacking: Mapping[str, tuple[int, set[Worker]]]) -> set[Worker]:
    """The workers whose slots are no more than those who may use them lack."""
    kept: set[Worker] = set()
    for _, usable in lacking.values():
        num_lacking = sum(number for number, others in lacking.values() if others & usable)
        if sum(map(num_free_slots, usable)) <= num_lacking:
            kept |= usable
    return kept
