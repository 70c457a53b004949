"""How much memory this process can still take: what the machine has left, or its control groups where that is less."""

from collections.abc import Iterator
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """The least of what the machine and each control group around this process leave; files in memory don't count."""
    return min([2**63, *_machine(root / "proc/meminfo"), *_control_groups(root)])


def _machine(path: Path) -> Iterator[int]:
    for words in _lines(path):
        if words[0] == "MemAvailable:":
            yield int(words[1]) * 1024


def _control_groups(root: Path) -> Iterator[int]:
    for words in _lines(root / "proc/self/cgroup"):
        _, controllers, group = " ".join(words).split(":", 2)
        if controllers == "":
            yield from _limits(root / "sys/fs/cgroup", group, *_V2)
        elif "memory" in controllers.split(","):
            yield from _limits(root / "sys/fs/cgroup/memory", group, *_V1)


def _limits(base: Path, group: str, limit: str, used: str, files: str) -> Iterator[int]:
    """Of the group and all above it; a container sees its own as the base, by whatever name the host has for it."""
    path = base / group.strip("/")
    for directory in (path, *path.parents):
        if not directory.is_relative_to(base):
            return
        numbers = [_number(directory / name) for name in (limit, used)]
        if numbers[0] is not None and numbers[1] is not None:
            reclaimable = {words[0]: int(words[1]) for words in _lines(directory / "memory.stat")}.get(files, 0)
            yield numbers[0] - max(0, numbers[1] - reclaimable)


def _number(path: Path) -> int | None:
    """None where there is none, such as no limit."""
    words = next(_lines(path), [""])
    return int(words[0]) if words[0].isdecimal() else None


def _lines(path: Path) -> Iterator[list[str]]:
    """Each line's words; none of a file that can't be read."""
    try:
        text = path.read_text("ascii", errors="replace")
    except OSError:
        return
    yield from (words for line in text.splitlines() if (words := line.split()))
