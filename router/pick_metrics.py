"""What a router counts that picks workers for gateways."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from pageferry.runtime.metrics import SECONDS, bound

PICKED = "picked"
OUTCOMES = (
    PICKED,
    "cancelled",
    "deadline_exceeded",
    "failed_precondition",
    "internal",
    "invalid_argument",
    "not_found",
    "permission_denied",
    "resource_exhausted",
    "unauthenticated",
    "unavailable",
    "other",
)
SERVED_BY = ("first", "fallback", "other")  # of the endpoints that were picked


class PickMetrics:
    """Labels take values from fixed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Generations that a gateway has asked about, by outcome: picked, or the status code of the refusal."
        self._picks = bound(Counter("pageferry_picks", text, ("outcome",), registry=registry), OUTCOMES)
        text = "From a generation's whole body to the choice, or the refusal."
        self._pick_s = Histogram("pageferry_pick_seconds", text, registry=registry, buckets=SECONDS)
        text = "Picked generations whose answer has begun, by who gave it: first, fallback, or other than was picked."
        self._served = bound(Counter("pageferry_picks_served", text, ("by",), registry=registry), SERVED_BY)

    def count(self, outcome: str, seconds: float) -> None:
        """`outcome` is PICKED, or the lower-case name of a status code; an unknown one counts as "other"."""
        self._picks[outcome if outcome in OUTCOMES else "other"].inc()
        self._pick_s.observe(seconds)

    def count_served(self, endpoint: str, picked: tuple[str, ...]) -> None:
        """A gateway says which endpoint has served what was picked for."""
        by = "first" if endpoint == picked[0] else "fallback" if endpoint in picked else "other"
        self._served[by].inc()
