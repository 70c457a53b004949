"""A process's Prometheus metrics. Labels take values from fixed sets, so that series stay few."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from pageferry.runtime.tls import Certificates
from pageferry.v1.inference_pb2 import WorkerLoad

# The largest finite bucket is above our longest deadline, the smallest below our fastest answer.
_REQUEST_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_TOKENS_PER_STEP = (1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
SILENCE_S = 10.0  # of a connection, whose thread then ends
OUTCOMES = (
    "stop",
    "length",
    "handed_over",
    "cancelled",
    "deadline_exceeded",
    "invalid_argument",
    "unauthenticated",
    "permission_denied",
    "resource_exhausted",
    "unavailable",
    "internal",
    "other",
)
RETRY_STEPS = ("other_prefill", "local")  # what follows a failed prefill: another worker, or the decode worker alone
# What follows the loss of a decode worker: another one goes on, the same since the worker drained, nothing since all
# tokens were there, or UNAVAILABLE.
RESUME_OUTCOMES = ("resumed", "moved", "complete", "given_up")


class Metrics:
    """What every process counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self._requests = counter("pageferry_requests", "Requests ended, by outcome.", ("outcome",))
        self._tokens = counter("pageferry_tokens", "Tokens of prompts, of them found cached, and generated.", ("kind",))
        self._open_calls = Gauge("pageferry_open_calls", "Calls that a drain would wait for.", registry=self.registry)
        self._lost_spans = counter("pageferry_spans_lost", "Spans that ended and could not be sent to the collector.")
        self.count_tokens()  # so that every kind is there from the start

    def follow_open_calls(self, num_open: Callable[[], int]) -> None:
        """Ask for the number of open calls whenever metrics are read."""
        self._open_calls.set_function(num_open)

    def count_lost_spans(self, num_spans: int) -> None:
        """Any thread may call."""
        self._lost_spans.inc(num_spans)

    def count_request(self, outcome: str) -> None:
        """`outcome` is a finish reason or the lower-case name of a status code; an unknown one counts as "other"."""
        self._requests.labels(outcome if outcome in OUTCOMES else "other").inc()

    def count_tokens(self, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """`cached`: tokens found in the prefix cache; those of the prompt count, so that a hit ratio is at most 1."""
        for kind, number in (("prompt", prompt), ("cached", min(cached, prompt)), ("generated", generated)):
            self._tokens.labels(kind).inc(number)

    def render(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int, certificates: Certificates | None = None) -> None:
        """Answer /metrics on its own port and thread until the process ends; with certificates, as peers are."""
        shown: dict[str, Any] = {}
        if certificates is not None:
            files = certificates.files
            ca = files.ca or None
            shown = {
                "certfile": files.cert,
                "keyfile": files.key,
                "client_cafile": ca,
                "client_auth_required": bool(ca),
            }
        server: Any = start_http_server(port, host, self.registry, **shown)[0]
        server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENCE_S})
        server.handle_error = lambda *_: None  # of a connection that broke, by whomever: it would print a traceback
        if certificates is not None:
            server.socket.do_handshake_on_connect = (
                False  # each connection's thread does: a silent one holds up no other
            )
            certificates.follow(server.socket.context)


class RouterMetrics(Metrics):
    """What only the router sees: whole requests."""

    def __init__(self) -> None:
        super().__init__()
        histogram = partial(Histogram, registry=self.registry)
        self.ttft_s = histogram("pageferry_time_to_first_token_seconds", "Arrival to first token.", buckets=_REQUEST_S)
        self.itl_s = histogram("pageferry_inter_token_seconds", "Gap between tokens of a stream.", buckets=_STEP_S)
        self.request_s = histogram("pageferry_request_seconds", "Arrival to last token.", buckets=_REQUEST_S)
        text = "Prefills that failed, by what was tried next."
        self._prefill_failures = Counter("pageferry_prefill_failures", text, ("next",), registry=self.registry)
        text = "Requests whose decode worker was lost, by what followed."
        self._resumes = Counter("pageferry_resumes", text, ("outcome",), registry=self.registry)
        text = "Requests whose objective for the first token, or between tokens, was met or missed, by profile."
        self._objectives = Counter("pageferry_slo", text, ("profile", "objective", "result"), registry=self.registry)
        text = "Switches of a profile to the one in effect."
        self._switches = Counter("pageferry_profile_switches", text, ("profile", "to"), registry=self.registry)
        text = "1 for the profile in effect for each that is asked for."
        self._profiles = Gauge("pageferry_profile_info", text, ("profile", "in_effect"), registry=self.registry)

    def count_prefill_failure(self, next_step: str) -> None:
        """`next_step` is one of RETRY_STEPS."""
        assert next_step in RETRY_STEPS, next_step
        self._prefill_failures.labels(next_step).inc()

    def count_resume(self, outcome: str) -> None:
        """`outcome` is one of RESUME_OUTCOMES."""
        assert outcome in RESUME_OUTCOMES, outcome
        self._resumes.labels(outcome).inc()

    def count_objective(self, profile: str, objective: str, *, met: bool) -> None:
        """`profile` is one of the configuration's, `objective` is "ttft" or "token"."""
        self._objectives.labels(profile, objective, "met" if met else "missed").inc()

    def count_profile_switch(self, profile: str, to: str) -> None:
        """Both are names of the configuration's."""
        self._switches.labels(profile, to).inc()

    def set_profiles(self, in_effect: Mapping[str, str]) -> None:
        """The profile in effect, by that asked for."""
        self._profiles.clear()
        for profile, effective in in_effect.items():
            self._profiles.labels(profile, effective).set(1)


class WorkerMetrics(Metrics):
    """What only a worker sees: its pool, its sequences, and hand-offs."""

    def __init__(self) -> None:
        super().__init__()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._pages = gauge("pageferry_pages", "Pages by state, of a cache group or of tails.", ("state", "pool"))
        self._sequences = gauge("pageferry_sequences", "Sequences, waiting or running.", ("state",))
        self._preemptions = counter("pageferry_preemptions", "Sequences preempted.")
        self._stalled = gauge("pageferry_engine_stalled", "1 while the engine makes no progress, else 0.")
        self._handoff_bytes = counter("pageferry_handoff_bytes", "Bytes of pages handed over.")
        self._handoff_pages = counter("pageferry_handoff_pages", "Pages handed over.")
        self._handoff_failures = counter("pageferry_handoff_failures", "Hand-offs broken off.")
        text = "End of prefill to commit."
        self.handoff_s = Histogram("pageferry_handoff_tail_seconds", text, buckets=_STEP_S, registry=self.registry)
        self._drafts = counter("pageferry_draft_tokens", "Drafts computed, and those accepted.", ("kind",))
        text = "Tokens that a step gave, as a mean over an answer's steps."
        self._tokens_per_step = Histogram(
            "pageferry_tokens_per_step", text, buckets=_TOKENS_PER_STEP, registry=self.registry
        )
        for kind in ("proposed", "accepted"):
            self._drafts.labels(kind)
        self._num_preemptions = 0

    def count_handoff(self, pages: int, num_bytes: int, tail_s: float) -> None:
        self._handoff_pages.inc(pages)
        self._handoff_bytes.inc(num_bytes)
        self.handoff_s.observe(tail_s)

    def count_broken_handoff(self) -> None:
        self._handoff_failures.inc()

    def count_drafts(self, num_proposed: int, num_accepted: int, num_generated: int) -> None:
        """Of a sequence that is over, and has so many tokens drawn here: each accepted draft is one without a step.

        Steps that only computed a part of the prompt give no tokens, and do not count.
        """
        self._drafts.labels("proposed").inc(num_proposed)
        self._drafts.labels("accepted").inc(num_accepted)
        num_steps = num_generated - num_accepted
        if num_steps > 0:
            self._tokens_per_step.observe(num_generated / num_steps)

    def set_load(self, load: WorkerLoad) -> None:
        """Gauges of pages and sequences, and the preemptions since the last load."""
        for pool in load.pools:
            name = str(pool.group) if pool.HasField("group") else "tails"
            for state in ("free", "cached", "reserved", "resident"):
                self._pages.labels(state, name).set(getattr(pool, f"pages_{state}"))
        self._stalled.set(load.stalled)
        self._sequences.labels("waiting").set(load.waiting)
        self._sequences.labels("running").set(load.running)
        self._preemptions.inc(max(0, load.preemptions - self._num_preemptions))
        self._num_preemptions = load.preemptions
