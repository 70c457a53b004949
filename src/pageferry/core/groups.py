"""Cache groups: which layers keep the keys and values of which tokens, and how that is written.

`0-14=window:256,sinks:4;15-29=full`: a layer of a window keeps the last 256 tokens, the one that asks included, and the
first 4. Each layer is named once. Layers of one policy are one group, with pages of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from pageferry.core.errors import InvalidArgumentError, invalid

MAX_TOKENS = 2**31 - 1  # of a window or sinks: kernels and the contract count positions in 32 bits


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens: all (`window` None), or the last `window` ones and the first `sinks`."""

    layers: tuple[int, ...]  # of the model, ascending; layer i of a page of the group is layers[i]
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window <= MAX_TOKENS:
            raise invalid("cache_layers", f"window:{self.window}", f"must be from 1 to {MAX_TOKENS}")
        if not 0 <= self.sinks <= (0 if self.window is None else MAX_TOKENS):
            limit = f"must be from 0 to {MAX_TOKENS}, and stand behind a window"
            raise invalid("cache_layers", f"sinks:{self.sinks}", limit)

    def __str__(self) -> str:
        policy = "full" if self.window is None else f"window:{self.window}"
        return f"{_layers_text(self.layers)}={policy}" + (f",sinks:{self.sinks}" if self.sinks else "")

    def first_seen(self, position: int) -> int:
        """The first position behind the sinks that a query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_sink_pages(self, page_size: int) -> int:
        return -(-self.sinks // page_size)

    def live_ranges(self, start: int, end: int, page_size: int) -> tuple[range, range]:
        """Indices of the pages that computing positions `start` to `end` reads or writes: sinks, and those behind."""
        num_pages, first = -(-end // page_size), self.first_seen(start) // page_size
        num_sinks = min(self.num_sink_pages(page_size), first)
        return range(min(num_sinks, num_pages)), range(first, num_pages)

    def live_pages(self, start: int, end: int, page_size: int) -> Iterator[int]:
        """The same indices, ascending."""
        return chain(*self.live_ranges(start, end, page_size))

    def live_at_end(self, num_tokens: int, page_size: int) -> Iterator[int]:
        """Indices, ascending, of what is handed over of so many tokens: what whoever goes on, or computes the last page
        anew, reads.
        """
        return self.live_pages((num_tokens - 1) // page_size * page_size, num_tokens, page_size)

    def most_live(self, num_tokens: int, chunk_tokens: int, page_size: int) -> int:
        """Most pages that a sequence of so many tokens holds at once, computed in chunks of at most `chunk_tokens`, or
        received: what `live_at_end` gives begins with a page, and so is no more than for one token at its end.
        """
        num_pages = -(-num_tokens // page_size)
        if self.window is None:
            return num_pages
        # A run of n tokens touches at most ⌈(n - 1) / B⌉ + 1 pages.
        touched = -(-(self.window - 1 + chunk_tokens - 1) // page_size) + 1
        return min(num_pages, self.num_sink_pages(page_size) + touched)


def full_group(num_layers: int) -> CacheGroup:
    return CacheGroup(tuple(range(num_layers)))


def parse_groups(text: str, num_layers: int, model_window: int | None) -> tuple[CacheGroup, ...]:
    """The groups of `text`, by their first layers; of an empty one, a single group as the model's own window has it.

    A window of the model's own holds in every layer, so that `full` keeps no more than it. InvalidArgumentError says
    what is wrong.
    """
    if not text.strip():
        return (CacheGroup(tuple(range(num_layers)), model_window),)
    policies: dict[int, tuple[int | None, int]] = {}
    for part in text.split(";"):
        layers, equals, policy = part.partition("=")
        if not equals:
            raise invalid("cache_layers", text, "must be LAYERS=POLICY;…, such as 0-14=window:256,sinks:4;15-29=full")
        window, sinks = _parse_policy(policy.strip(), text)
        if window is not None and model_window is not None and window > model_window:
            raise invalid("cache_layers", f"window:{window}", f"must be at most the model's own, {model_window}")
        for layer in _parse_layers(layers, text, num_layers):
            if layer in policies:
                raise invalid("cache_layers", text, f"but layer {layer} stands there twice")
            policies[layer] = (model_window if window is None else window, sinks)
    missing = [layer for layer in range(num_layers) if layer not in policies]
    if missing:
        limit = f"must name each of the {num_layers} layers, once; missing: {_layers_text(missing)}"
        raise invalid("cache_layers", text, limit)
    members: dict[tuple[int | None, int], list[int]] = {}
    for layer in range(num_layers):
        members.setdefault(policies[layer], []).append(layer)
    return tuple(CacheGroup(tuple(layers), *policy) for policy, layers in members.items())


def groups_text(groups: tuple[CacheGroup, ...]) -> str:
    """What `parse_groups` reads."""
    return ";".join(str(group) for group in groups)


def _parse_layers(spec: str, text: str, num_layers: int) -> Iterator[int]:
    for item in spec.split(","):
        first, dash, last = item.strip().partition("-")
        try:
            start, end = int(first), int(last if dash else first)
        except ValueError:
            raise invalid("cache_layers", text, f"must name layers as 3 or 0-14, not {item.strip()!r}") from None
        if not 0 <= start <= end < num_layers:
            raise invalid("cache_layers", item.strip(), f"must be layers from 0 to {num_layers - 1}, ascending")
        yield from range(start, end + 1)


def _parse_policy(policy: str, text: str) -> tuple[int | None, int]:
    """Window and sinks."""
    if policy == "full":
        return None, 0
    values: dict[str, int] = {}
    for item in policy.split(","):
        name, colon, number = item.strip().partition(":")
        is_number = number.isascii() and number.isdecimal()
        if name not in ("window", "sinks") or name in values or not colon or not is_number:
            raise _bad_policy(text)
        values[name] = int(number)
    if "window" not in values:
        raise _bad_policy(text)
    return values["window"], values.get("sinks", 0)


def _bad_policy(text: str) -> InvalidArgumentError:
    return invalid("cache_layers", text, "must have full, window:W or window:W,sinks:S behind each =")


def layer_runs(layers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    for _, run in groupby(enumerate(layers), key=lambda item: item[1] - item[0]):
        members = [layer for _, layer in run]
        yield members[0], members[-1]


def _layers_text(layers: Iterable[int]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in layer_runs(layers))
