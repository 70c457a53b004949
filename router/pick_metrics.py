"""What a router counts that picks workers for gateways."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_PICK_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class PickMetrics:
    """Labels take values from fixed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Generations that a gateway has asked about, by outcome: picked, or the status code of the refusal."
        self._picks = Counter("pageferry_picks", text, ("outcome",), registry=registry)
        text = "From a generation's whole body to the choice."
        self._pick_s = Histogram("pageferry_pick_seconds", text, buckets=_PICK_S, registry=registry)
        text = "Picked generations whose answer has begun, by who gave it: first, fallback, or other than was picked."
        self._served = Counter("pageferry_picks_served", text, ("by",), registry=registry)

    def count(self, outcome: str, seconds: float) -> None:
        """`outcome` is "picked", or the lower-case name of a status code."""
        self._picks.labels(outcome).inc()
        self._pick_s.observe(seconds)

    def count_served(self, endpoint: str, picked: tuple[str, ...]) -> None:
        """A gateway says which endpoint has served what was picked for."""
        by = "first" if endpoint == picked[0] else "fallback" if endpoint in picked else "other"
        self._served.labels(by).inc()
