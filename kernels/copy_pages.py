"""Pages to and from a flat buffer, with crc32c of what was copied, and a check of scales and zero points.

A page's bytes are ranges of it, one after the other in the buffer. The compiled copy takes the checksum from the
registers it copies through (cpu/copies.h); without it the copies are Python's and the checksum the `crc32c` package's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from pageferry.kernels.cpu_library import copy_functions

Ranges = Sequence[tuple[int, int]]  # start in the page, and length: of elements, scales and zero points
_INFINITY = 0x7C00  # fp16, as bits: from here on, without the sign, it isn't finite


class Check(NamedTuple):
    """`bad_part`: 1 where a scale isn't finite and positive, 2 where a zero point isn't finite, else 0."""

    crc32c: int
    bad_part: int = 0
    bad_index: int = 0
    bad_bits: int = 0


def read_pages(
    memory: memoryview, starts: Sequence[int], ranges: Ranges, buffer: memoryview, offsets: Sequence[int]
) -> list[int]:
    """Copy the pages that begin at `starts` of `memory` to `offsets` of the buffer; crc32c of each. Drops the GIL."""
    functions = copy_functions()
    if functions is None:
        return read_pages_ref(memory, starts, ranges, buffer, offsets)
    parts, checks = _parts(memory, starts, ranges, offsets)
    functions.read(functions.level, parts.ctypes.data, len(parts), address(buffer), checks.ctypes.data)
    return checks[:, 0].tolist()


def write_pages(
    memory: memoryview, starts: Sequence[int], ranges: Ranges, buffer: Any, offsets: Sequence[int]
) -> list[Check]:
    """The way back; the checks are of what lies in `memory` then. Drops the GIL."""
    functions = copy_functions()
    if functions is None:
        return write_pages_ref(memory, starts, ranges, buffer, offsets)
    parts, checks = _parts(memory, starts, ranges, offsets)
    functions.write(functions.level, parts.ctypes.data, len(parts), address(buffer), checks.ctypes.data)
    return [Check(*row) for row in checks.tolist()]


def address(buffer: Any) -> int:
    """Of any contiguous bytes' first one, writable or not; the caller keeps them alive."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def read_pages_ref(
    memory: memoryview, starts: Sequence[int], ranges: Ranges, buffer: memoryview, offsets: Sequence[int]
) -> list[int]:
    checksums = []
    for page, offset in zip(starts, offsets, strict=True):
        data = b"".join([memory[page + start : page + start + length] for start, length in ranges])
        buffer[offset : offset + len(data)] = data
        checksums.append(crc32c(data))
    return checksums


def write_pages_ref(
    memory: memoryview, starts: Sequence[int], ranges: Ranges, buffer: Any, offsets: Sequence[int]
) -> list[Check]:
    source, checks = memoryview(buffer), []
    for page, offset in zip(starts, offsets, strict=True):
        parts = []
        for start, length in ranges:
            parts.append(memory[page + start : page + start + length])
            parts[-1][:] = source[offset : offset + length]
            offset += length
        checks.append(check_parts(parts))
    return checks


def check_parts(parts: Sequence[memoryview | bytes]) -> Check:
    """Of a page's elements, scales and zero points, as far as there are any."""
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    for kind, part in enumerate(parts[1:], 1):
        bits = np.frombuffer(part, "<u2")
        # Less one, a scale of 0 wraps: then it is too large, as negative ones are.
        sizes, limit = (bits - np.uint16(1), _INFINITY - 1) if kind == 1 else (bits & 0x7FFF, _INFINITY)
        if sizes.max() >= limit:
            index = int(np.argmax(sizes >= limit))
            return Check(checksum, kind, index, int(bits[index]))
    return Check(checksum)


def _parts(memory: memoryview, starts: Sequence[int], ranges: Ranges, offsets: Sequence[int]) -> tuple[Any, Any]:
    """Arrays of PageCopy and PageCheck, see cpu/abi.h."""
    parts = np.zeros((len(starts), 8), np.int64)
    parts[:, 0] = starts
    parts[:, 0] += address(memory)
    for index, (start, length) in enumerate(ranges):
        parts[:, 1 + index], parts[:, 4 + index] = start, length
    parts[:, 7] = offsets
    return parts, np.empty((len(starts), 4), np.uint32)
