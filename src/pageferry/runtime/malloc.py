"""glibc's allocator, set for messages of a megabyte."""

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_KEPT_BYTES = 64 << 20
_MMAPPED_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Keep up to 64 MB that was freed: pages of messages that come one after the other need not be faulted in anew.

    By default each frame's memory goes back to the system and comes again, which costs a receiver half its time.
    Without glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAPPED_BYTES)
