"""Whether a file has changed since it was read."""

from pathlib import Path

Stamp = tuple[int, int, int]


def stamp_of(path: str | Path) -> Stamp | None:
    """What changes when the file does; None where it can't be found."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
