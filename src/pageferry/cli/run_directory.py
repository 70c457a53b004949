"""Where a run keeps the configuration of its processes, secrets and all; what killed runs left is removed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "pageferry-run-"
_LOCK = "lock"  # held for as long as the run lives, however that ends


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A directory of one's own, below the system's for temporary files, until the block ends."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        directory = Path(name)
        unseen = directory / f"new-{_LOCK}"
        with unseen.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unseen.rename(directory / _LOCK)  # whoever finds a lock finds it held
            yield directory


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        # Of other users, or gone: whoever can't be sure leaves it alone.
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with lock.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
