"""How pages' bytes leave a worker's pools and enter another's: in runs, to and from flat buffers."""

import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pageferry.core.layout import CacheLayout
from pageferry.core.pool import PageId

Buffer = bytes | bytearray | memoryview
FACTORS = ("", "scale", "zero point")


class PageRun(NamedTuple):
    """The same layers of pages of one pool, and where in a buffer the bytes of each lie.

    Elements, then scales, then zero points. Layers count from the group's first.
    """

    group: int
    is_tail: bool  # whether the pool is that of the group's tails
    as_tail: bool  # what the pages are in the buffer; differs where a source without tails is read as one that has them
    first_layer: int
    num_layers: int
    pages: Sequence[PageId]
    offsets: Sequence[int]


class BadFactor(NamedTuple):
    """A number of a page that can't be: a scale not finite and positive, or a zero point not finite."""

    position: int  # of its page in the run
    kind: int  # index into FACTORS
    number: int  # among the scales, or zero points, of the run's layers
    bits: int  # as fp16

    def describe(self, layout: CacheLayout, run: PageRun) -> str:
        pages = (layout.tails if run.is_tail else layout.pages)[run.group]
        in_layer = (pages.scale_layer_bytes if self.kind == 1 else pages.zero_layer_bytes) // 2
        (value,) = struct.unpack("<e", self.bits.to_bytes(2, "little"))
        limit = "finite and positive" if self.kind == 1 else "finite"
        layer = run.first_layer + self.number // in_layer
        return f"layer {layer}: a {FACTORS[self.kind]} is {value}, must be {limit}"


class Written(NamedTuple):
    """What a run was found to be, in the pages themselves: crc32c of each, and the first number that can't be."""

    checksums: Sequence[int]
    bad_factor: BadFactor | None


class DeviceClock(Protocol):
    """What copies from and to a device have taken by its own clock; read it on the thread that makes them."""

    @property
    def device_name(self) -> str: ...
    @property
    def copied_s(self) -> float | None:
        """Seconds of all of them; None where pages are in a processor's memory."""
        ...


class PageSource(Protocol):
    """Where pages are read from; any thread may call, for pages it holds a reference to."""

    layout: CacheLayout

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        """Copy the run's bytes into the buffer; crc32c of each page's."""
        ...

    def converted(self, layout: CacheLayout) -> "PageSource":
        """The same pages as a pool of that layout holds them, for a `layout` that this one's `ships_to`."""
        ...


class PageSink(Protocol):
    """Where pages are written to; any thread may call, for pages it holds a reference to."""

    layout: CacheLayout

    def write_from(self, run: PageRun, buffer: Buffer) -> Written:
        """Copy the run's bytes into its pages, and judge what lies there then.

        Another process may write to the buffer meanwhile: what is judged is what the pages hold.
        """
        ...
