"""How large each process of a deployment is over time, and whether it grows."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services import Service

WARM_UP_S = 60.0  # of a process's life, in which buffers grow to what the load needs
MIN_WATCHED_S = 120.0  # below, a slope says nothing
MAX_GROWTH = 0.03  # of the resident size, over the time watched
MIN_GROWTH_BYTES = 4e6  # always allowed: an allocator's granularity


@dataclass(frozen=True, slots=True)
class Sample:
    """Sizes are bytes resident; `shared` is memory that pages are handed over in, which comes and goes with peers."""

    at: float  # monotonic seconds
    rss: int
    shared: int
    fds: int
    threads: int

    @property
    def own(self) -> int:
        return self.rss - self.shared

    def __str__(self) -> str:
        return f"{self.own / 1e6:.1f} and {self.shared / 1e6:.0f} MB shared, {self.fds} files {self.threads} threads"


@dataclass(slots=True)
class Life:
    """One process from its start on."""

    name: str
    pid: int
    began: float
    samples: list[Sample] = field(default_factory=list)

    def growth(self, since: float) -> float | None:
        """Bytes grown by from then on, along the line through its samples; None where too few are watched."""
        watched = [sample for sample in self.samples if sample.at >= max(since, self.began + WARM_UP_S)]
        if len(watched) < 3 or watched[-1].at - watched[0].at < MIN_WATCHED_S:
            return None
        line = statistics.linear_regression([s.at for s in watched], [s.own for s in watched])
        return line.slope * (watched[-1].at - watched[0].at)

    def problem(self, since: float) -> str:
        """How it grows, "" where it doesn't."""
        growth = self.growth(since)
        if growth is None or growth <= max(MIN_GROWTH_BYTES, MAX_GROWTH * self.samples[-1].own):
            return ""
        return f"{self.name} (process {self.pid}) grew by {growth / 1e6:.1f} MB to {self.samples[-1]}"


def sample(service: Service) -> Sample:
    """Raises OSError where the process is gone."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{service.pid}/status").read_text(encoding="ascii").splitlines()
    )
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"{service.name} is ending")
    rss, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem"))
    return Sample(time.monotonic(), rss, shared, service.fds(), int(fields["Threads"]))


class Watch:
    """The lives of all processes of a run."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.lives: list[Life] = []
        self._services = services
        self._present: dict[str, Life] = {}

    def take(self) -> None:
        """Sample all that live."""
        for service in self._services:
            if not service.is_alive:
                continue
            life = self._present.get(service.name)
            try:
                taken = sample(service)
            except OSError:
                continue
            if life is None or life.pid != service.pid:
                life = self._present[service.name] = Life(service.name, service.pid, taken.at)
                self.lives.append(life)
            life.samples.append(taken)

    def line(self) -> str:
        """The present sizes, for a report."""
        lives = sorted(self._present.values(), key=lambda life: life.name)
        return "; ".join(f"{life.name} {life.samples[-1]}" for life in lives)

    def growths(self, since: float) -> list[str]:
        """What was watched long enough, and by how much it grew."""
        watched = [(life, life.growth(since)) for life in self.lives]
        return [f"{life.name} {growth / 1e6:+.1f} MB" for life, growth in watched if growth is not None]

    def problems(self, since: float) -> list[str]:
        return [problem for life in self.lives if (problem := life.problem(since))]


@dataclass(frozen=True, slots=True)
class Level:
    """The most files and threads that a process of each role has at rest."""

    files: dict[str, int]
    threads: dict[str, int]

    @classmethod
    def of(cls, services: Iterable[Service]) -> "Level":
        files: dict[str, int] = {}
        threads: dict[str, int] = {}
        for service in services:
            taken = sample(service)
            files[service.role] = max(files.get(service.role, 0), taken.fds)
            threads[service.role] = max(threads.get(service.role, 0), taken.threads)
        return cls(files, threads)

    def above(self, services: Iterable[Service], *, files: int, threads: int) -> list[str]:
        """Which processes have more than that beyond the level, in words."""
        found = []
        for service in services:
            taken = sample(service)
            for what, count, level, spare in (
                ("files", taken.fds, self.files[service.role], files),
                ("threads", taken.threads, self.threads[service.role], threads),
            ):
                if count > level + spare:
                    found.append(f"{service.name}: {count} {what}, {level} before the run")
        return found
