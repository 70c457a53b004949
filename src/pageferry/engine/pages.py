"""The pools' memory: pages and tails as bytes to the transport, and as tensors to the kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pageferry.core.layout import CacheLayout, PageKey, PageLayout, Place
from pageferry.core.page_io import Buffer, PageRun, PageSource, Written
from pageferry.core.pool import PageId
from pageferry.engine.conversion import ConvertedPages
from pageferry.engine.pool_memory import PoolMemory
from pageferry.kernels.append_pages import LayerPages


class PageTensors:
    """A pool of pages of each cache group, and where the format has tails one of those; `PageSource` and `PageSink`.

    Any thread may read and write pages that it holds and no other thread touches. All else is for the engine's
    thread.
    """

    def __init__(self, layout: CacheLayout, num_pages: Sequence[int], num_tails: int) -> None:
        self.layout = layout
        self.pools = tuple(self._pool_memory(pages, num) for pages, num in zip(layout.pages, num_pages, strict=True))
        self.tails = tuple(self._pool_memory(tails, num_tails) for tails in layout.tails)
        self.layers = self._layers()

    @property
    def device_name(self) -> str:
        """Empty for a processor."""
        return ""

    @property
    def copied_s(self) -> float | None:
        return None

    @property
    def num_bytes(self) -> int:
        return sum(pool.memory.numel() for pool in (*self.pools, *self.tails))

    def read(self, key: PageKey, place: Place, first_layer: int, num_layers: int) -> bytes:
        """A copy of the layer range's bytes: payload, then scales, then zero points."""
        assert key.is_tail == place.is_tail, f"{key} does not lie at {place}"
        return self._pool(place).read(place.page, first_layer, num_layers)

    def write(self, place: Place, first_layer: int, num_layers: int, payload: bytes) -> None:
        """Copy a layer range's bytes into the page; InvalidArgumentError unless exactly that many are given."""
        self._pool(place).write(place.page, first_layer, num_layers, payload)

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        assert run.as_tail == run.is_tail, "pages of these pools are what they are"
        return self._pool_of(run).read_into(run, buffer)

    def write_from(self, run: PageRun, buffer: Buffer) -> Written:
        return self._pool_of(run).write_from(run, buffer)

    def converted(self, layout: CacheLayout) -> PageSource:
        """The same pages as a pool of that layout holds them, for a `layout` that this one's `ships_to`."""
        return self if layout == self.layout else ConvertedPages(self, layout)

    def blank(self, places: Iterable[Place]) -> None:
        """Make every slot unused: zero, with scale 1 and zero point 0."""
        together: dict[PoolMemory, list[PageId]] = {}
        for place in places:
            together.setdefault(self._pool(place), []).append(place.page)
        for pool, pages in together.items():
            pool.blank(pages)

    def copy(self, source: Place, target: Place) -> None:
        self._pool(source).copy(source.page, target.page)

    def _pool_memory(self, layout: PageLayout, num_pages: int) -> PoolMemory:
        return PoolMemory(layout, num_pages)

    def _pool(self, place: Place) -> PoolMemory:
        self.layout.of(place)
        return (self.tails if place.is_tail else self.pools)[place.group]

    def _pool_of(self, run: PageRun) -> PoolMemory:
        return self._pool(Place(run.group, PageId(0), run.is_tail))

    def _layers(self) -> tuple[LayerPages, ...]:
        """By their numbers in the model."""
        layers: dict[int, LayerPages] = {}
        for index, (group, pool) in enumerate(zip(self.layout.groups, self.pools, strict=True)):
            for i, layer in enumerate(group.layers):
                keys, values = pool.sides(i)
                if self.tails:
                    opened = self.tails[index].sides(i)
                    keys = replace(keys, tails=opened[0].payload)
                    values = replace(values, tails=opened[1].payload)
                layers[layer] = LayerPages(keys, values, index, group.window, group.sinks)
        return tuple(layers[layer] for layer in sorted(layers))
