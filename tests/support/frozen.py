"""One thread of another process, stopped and let go again, while the rest of that process runs on."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_PTRACE_DETACH = 17
_PTRACE_SEIZE = 0x4206
_PTRACE_INTERRUPT = 0x4207
_WALL = 0x40000000


def thread_of(pid: int, name: str) -> int:
    """The id of a process's thread, by the name that the kernel has for it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(task.name) for task in tasks if (task / "comm").read_text(encoding="utf-8").strip() == name]
    assert len(found) == 1, f"{len(found)} threads of {pid} are called {name!r}"
    return found[0]


@contextlib.contextmanager
def frozen(thread: int) -> Iterator[None]:
    """The thread stands still inside the block. Skips the test where the system doesn't let one trace others.

    It may hold Python's lock just then, and so all others up: whoever needs them to run must look, and try again.
    """
    _ptrace(_PTRACE_SEIZE, thread)
    try:
        _ptrace(_PTRACE_INTERRUPT, thread)
        os.waitpid(thread, _WALL)
        yield
    finally:
        _ptrace(_PTRACE_DETACH, thread)


def _ptrace(request: int, thread: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    library.ptrace.restype = ctypes.c_long
    if library.ptrace(request, thread, None, None) == -1:
        pytest.skip(f"may not trace other processes: {os.strerror(ctypes.get_errno())}")
