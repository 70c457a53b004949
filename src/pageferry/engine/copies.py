"""Runs of pages: what the copying kernel says of one, and copies page by page where pages are no plain memory."""

from collections.abc import Callable, Sequence

from crc32c import crc32c

from pageferry.core.layout import PageKey, PageLayout, Place
from pageferry.core.page_io import BadFactor, Buffer, PageRun, Written
from pageferry.kernels.copy_pages import Check, check_parts


def written(checks: Sequence[Check]) -> Written:
    """Of a run's pages, in order."""
    bad = next((BadFactor(index, *check[1:]) for index, check in enumerate(checks) if check.bad_part), None)
    return Written([check.crc32c for check in checks], bad)


def read_by_page(read: Callable[[PageKey, Place, int, int], bytes], run: PageRun, buffer: memoryview) -> Sequence[int]:
    """`PageSource.read_into` over a call that gives the bytes of a page's layers. Their keys have no index."""
    checksums = []
    for page, offset in zip(run.pages, run.offsets, strict=True):
        key, place = PageKey(run.group, 0, run.as_tail), Place(run.group, page, run.is_tail)
        data = read(key, place, run.first_layer, run.num_layers)
        buffer[offset : offset + len(data)] = data
        checksums.append(crc32c(data))
    return checksums


def write_by_page(
    write: Callable[[Place, int, int, bytes], None], layout: PageLayout, run: PageRun, buffer: Buffer
) -> Written:
    """`PageSink.write_from` over a call that writes a page's layers: it gets, as is judged, our own copy of them."""
    checks = []
    for page, offset in zip(run.pages, run.offsets, strict=True):
        parts = []
        for _, length in layout.ranges(run.first_layer, run.num_layers):
            parts.append(bytes(buffer[offset : offset + length]))
            offset += length
        write(Place(run.group, page, run.is_tail), run.first_layer, run.num_layers, b"".join(parts))
        checks.append(check_parts(parts))
    return written(checks)
