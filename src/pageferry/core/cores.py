"""How many processor cores this process has been given."""

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def num_cores(cgroups: Path = _CGROUPS) -> int:
    """Those that it may run on, or the whole ones of a container's quota where these are fewer.

    More threads than that would run into the quota, and then all stop until its period ends.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_quota(cgroups) or cores)))


def _quota(cgroups: Path) -> float | None:
    """In cores; None where there is no limit, or none that can be read."""
    unified = _words(cgroups / "cpu.max")
    numbers = unified or _words(cgroups / "cpu" / "cpu.cfs_quota_us") + _words(cgroups / "cpu" / "cpu.cfs_period_us")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):  # "max", or -1
        return None
    return int(numbers[0]) / max(1, int(numbers[1]))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").split()
    except OSError:
        return []
