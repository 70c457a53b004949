"""A process's Prometheus metrics. Labels take values from fixed sets, so that series stay few."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from pageferry.v1.inference_pb2 import WorkerLoad

# The largest finite bucket is above our longest deadline, the smallest below our fastest answer.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
OUTCOMES = (
    "stop",
    "length",
    "handed_over",
    "cancelled",
    "deadline_exceeded",
    "invalid_argument",
    "resource_exhausted",
    "unavailable",
    "internal",
    "other",
)
RETRY_STEPS = ("other_prefill", "local")  # what follows a failed prefill: another worker, or the decode worker alone


class Metrics:
    """All metrics of one process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("pageferry_requests", "Requests ended, by outcome.", ("outcome",), registry=registry)
        self._tokens = Counter("pageferry_tokens", "Tokens: prompt, cached or generated.", ("kind",), registry=registry)
        self._pages = Gauge("pageferry_pages", "Pages of the pool, by state.", ("state",), registry=registry)
        self._sequences = Gauge("pageferry_sequences", "Sequences, waiting or running.", ("state",), registry=registry)
        self._preemptions = Counter("pageferry_preemptions", "Sequences preempted.", registry=registry)
        self._handoff_bytes = Counter("pageferry_handoff_bytes", "Bytes of pages handed over.", registry=registry)
        self._handoff_pages = Counter("pageferry_handoff_pages", "Pages handed over.", registry=registry)
        self._handoff_failures = Counter("pageferry_handoff_failures", "Hand-offs broken off.", registry=registry)
        self._prefill_failures = Counter(
            "pageferry_prefill_failures", "Prefills that failed, by what was tried next.", ("next",), registry=registry
        )
        self.ttft_s = Histogram(
            "pageferry_time_to_first_token_seconds", "Arrival to first token.", buckets=_SECONDS, registry=registry
        )
        self.itl_s = Histogram(
            "pageferry_inter_token_seconds", "Gap between tokens of a stream.", buckets=_STEP_SECONDS, registry=registry
        )
        self.request_s = Histogram(
            "pageferry_request_seconds", "Arrival to last token.", buckets=_SECONDS, registry=registry
        )
        self.handoff_s = Histogram(
            "pageferry_handoff_tail_seconds", "End of prefill to commit.", buckets=_STEP_SECONDS, registry=registry
        )
        self._num_preemptions = 0

    def count_request(self, outcome: str) -> None:
        """`outcome` is a finish reason or the lower-case name of a status code; an unknown one counts as "other"."""
        self._requests.labels(outcome if outcome in OUTCOMES else "other").inc()

    def count_tokens(self, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        for kind, number in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._tokens.labels(kind).inc(number)

    def count_handoff(self, pages: int, num_bytes: int, tail_s: float) -> None:
        self._handoff_pages.inc(pages)
        self._handoff_bytes.inc(num_bytes)
        self.handoff_s.observe(tail_s)

    def count_broken_handoff(self) -> None:
        self._handoff_failures.inc()

    def count_prefill_failure(self, next_step: str) -> None:
        """`next_step` is one of RETRY_STEPS."""
        assert next_step in RETRY_STEPS, next_step
        self._prefill_failures.labels(next_step).inc()

    def set_load(self, load: WorkerLoad) -> None:
        """Gauges of pages and sequences, and the preemptions since the last load."""
        for state in ("free", "cached", "reserved", "resident"):
            self._pages.labels(state).set(getattr(load, f"pages_{state}"))
        self._sequences.labels("waiting").set(load.waiting)
        self._sequences.labels("running").set(load.running)
        self._preemptions.inc(max(0, load.preemptions - self._num_preemptions))
        self._num_preemptions = load.preemptions

    def render(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int) -> None:
        """Answer /metrics on its own port and thread until the process ends."""
        start_http_server(port, host, self.registry)
