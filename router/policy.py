"""Which workers a request goes to: pure functions over what is known of the workers at one moment.

A decode worker is chosen first, by the share of its free pages and of its slots that the request would take; where it
has several pools of pages, the pool counts of which it would take the greatest share. Further answers to a request go
to the decode worker that has its prompt, while that has room. Among the prefill workers that can fill its pages the
one with the lowest predicted time to first token is taken. The decode worker computes the prompt itself where that is
short, or where nobody else can, or where it is predicted to be faster by more than all its streams would lose.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pageferry.router.candidates import DecodeState, Demand, PrefillState


class Source(Enum):
    """Who computes the prompt, and who generates after its first token."""

    PUSHED = "pushed"  # a prefill worker, which hands over to a decode worker
    LOCAL = "local"  # the decode worker, all of it
    PREFILL_ONLY = "prefill_only"  # a prefill worker; one token is all that is asked for


@dataclass(frozen=True, slots=True)
class Settings:
    local_prefill_tokens: int
    headroom_pages: int
    # A decode worker without streams must be this much faster than the alternative: both times are predictions.
    local_advantage: float = 2.0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and why; `attributes` are those of its span."""

    source: Source
    prefill: str | None
    decode: str | None
    attributes: dict[str, str | float | int] = field(default_factory=dict)


def choose(
    demand: Demand, prefills: Sequence[PrefillState], decodes: Sequence[DecodeState], settings: Settings
) -> Route | None:
    """The route, or None where the request had better wait for a change of load."""
    prefills = [] if demand.local_only else [prefill for prefill in prefills if prefill.fits(demand)]
    if demand.is_one_token and (alone := [prefill for prefill in prefills if demand.accepts(prefill.layout)]):
        prefill = _best_prefill(demand, alone)
        return _only(prefill, demand) if prefill is not None else None
    for decode in by_load(demand, decodes, settings):
        partners = [prefill for prefill in prefills if prefill.layout.ships_to(decode.layout)]
        route = _with(decode, partners, demand, settings)
        if route is not None:
            return route
    return None


def _only(prefill: PrefillState, demand: Demand) -> Route:
    attributes = {"pageferry.route.reason": "one token is asked for", **_prefill_attributes(prefill, demand)}
    return Route(Source.PREFILL_ONLY, prefill.address, None, attributes)


def by_load(demand: Demand, decodes: Sequence[DecodeState], settings: Settings) -> list[DecodeState]:
    """Those that can take the request, the best first; the last ones by taking a place from something less urgent."""
    rooms = {decode.address: decode.has_room(demand, settings.headroom_pages) for decode in decodes}
    able = [
        d
        for d in decodes
        if d.fits(demand) and demand.accepts(d.layout) and (rooms[d.address] or d.may_make_room(demand))
    ]
    return sorted(
        able,
        key=lambda decode: (
            not rooms[decode.address],
            decode.address != demand.near,
            decode.load_score(demand, settings.headroom_pages),
            decode.num_active,
            -min(decode.available_pages),
            decode.address,
        ),
    )


def _best_prefill(demand: Demand, prefills: Iterable[PrefillState]) -> PrefillState | None:
    """The one with the lowest predicted time of those with little queued; None where all have enough to do.

    One that has nothing to do and has measured nothing yet goes first: else nobody would ever learn that it is fast.
    """
    ready = [prefill for prefill in prefills if prefill.has_little_queued(demand)]
    return min(ready, key=lambda p: (not p.is_untried, p.ttft_s(demand), p.num_waiting, p.address), default=None)


def _with(decode: DecodeState, partners: Sequence[PrefillState], demand: Demand, settings: Settings) -> Route | None:
    """The route over this decode worker; None where waiting for a prefill worker is better."""
    local_s = decode.ttft_s(demand)
    # The alternative is the fastest prefill worker, whether or not it takes another request just now.
    fastest = min(partners, key=lambda prefill: (prefill.ttft_s(demand), prefill.address), default=None)
    reason = _why_local(decode, fastest, demand, settings)
    if reason:
        attributes = {"pageferry.route.reason": reason, **_decode_attributes(decode, demand, settings)}
        if fastest is not None:
            attributes |= {
                "pageferry.route.alternative": Source.PUSHED.value,
                "pageferry.route.alternative_prefill": fastest.address,
                "pageferry.route.alternative_ttft_ms": fastest.ttft_s(demand) * 1000,
            }
        return Route(Source.LOCAL, None, decode.address, attributes)
    prefill = _best_prefill(demand, partners)
    if prefill is None:
        return None
    attributes = {
        "pageferry.route.reason": "lowest predicted time to first token",
        **_prefill_attributes(prefill, demand),
        **_decode_attributes(decode, demand, settings),
        "pageferry.route.alternative": Source.LOCAL.value,
    }
    if local_s is not None:
        attributes["pageferry.route.alternative_ttft_ms"] = local_s * 1000
    return Route(Source.PUSHED, prefill.address, decode.address, attributes)


def _why_local(decode: DecodeState, fastest: PrefillState | None, demand: Demand, settings: Settings) -> str:
    """Why the decode worker computes the prompt itself; empty where it should not."""
    if demand.local_only:
        return "prefill workers have failed"
    if fastest is None:
        return "no prefill worker is usable"
    uncached = demand.num_tokens - decode.cached_tokens
    if uncached <= settings.local_prefill_tokens:
        return f"{uncached} uncached tokens are at most {settings.local_prefill_tokens}"
    local_s = decode.ttft_s(demand)
    # A prefill worker that has measured nothing yet must be given work to measure.
    if local_s is None or fastest.tokens_per_s <= 0:
        return ""
    # Each of its streams stalls while it computes a prompt.
    lost_s = local_s * (settings.local_advantage + decode.num_active)
    return "predicted to be faster" if lost_s < fastest.ttft_s(demand) else ""


def _prefill_attributes(prefill: PrefillState, demand: Demand) -> dict[str, str | float | int]:
    return {
        "pageferry.route.prefill": prefill.address,
        "pageferry.route.prefill_ttft_ms": prefill.ttft_s(demand) * 1000,
        "pageferry.route.prefill_queued_tokens": prefill.queued_tokens,
        "pageferry.route.prefill_cached_tokens": prefill.cached_tokens,
    }


def _decode_attributes(decode: DecodeState, demand: Demand, settings: Settings) -> dict[str, str | float | int]:
    attributes: dict[str, str | float | int] = {
        "pageferry.route.decode": decode.address,
        "pageferry.route.decode_score": decode.load_score(demand, settings.headroom_pages),
        "pageferry.route.decode_active": decode.num_active,
        "pageferry.route.decode_available_pages": decode.scarcest_pages(demand, settings.headroom_pages)[1],
        "pageferry.route.decode_cached_tokens": decode.cached_tokens,
    }
    local_s = decode.ttft_s(demand)
    if local_s is not None:
        attributes["pageferry.route.decode_ttft_ms"] = local_s * 1000
    return attributes
