"""The router's metrics: whole requests, its queue, and its workers."""

from collections import Counter as Numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import Counter, Histogram

from pageferry.core.errors import PageferryError
from pageferry.router.workers import Role, Worker, WorkerState
from pageferry.runtime.metrics import SECONDS, Metrics, Reading, bound
from pageferry.v1.inference_pb2 import ProfileStatus

RETRY_STEPS = ("other_prefill", "local")  # what follows a failed prefill: another worker, or the decode worker alone
# What follows the loss of a decode worker: another one goes on, the same since the worker drained, nothing since all
# tokens were there, or UNAVAILABLE.
RESUME_OUTCOMES = ("resumed", "moved", "complete", "given_up")
FIRST_TOKEN_PARTS = ("tokenize", "queue", "reserve", "prefill_queue", "prefill", "delivery")
SECOND_TOKEN_PARTS = ("transfer_tail", "decode_queue", "first_step")
RESULTS = {True: "met", False: "missed"}  # of an objective
# Reasons of errors that refuse a request before it is begun; what has none of these counts by its status.
REJECTIONS = (
    "QUEUE_FULL",
    "TTFT_BEYOND_DEADLINE",
    "DEADLINE_IN_QUEUE",
    "NO_WORKER",
    "NO_PAGE_FORMAT",
    "DRAINING",
    "EXCEEDS_POOL",
    "TOO_LONG",
    "PROMPT_TOO_LARGE",
    "TENANT_MAX_REQUESTS",
    "TENANT_MAX_PAGES",
    "TENANT_REQUESTS_PER_MINUTE",
    "TENANT_TOKENS_PER_MINUTE",
    "PRIORITY_DENIED",
    "PROFILE_DENIED",
    "NO_API_KEY",
    "UNKNOWN_API_KEY",
    "REQUEST_ID_LIVE",
    "BODIES_FULL",
)
_REJECTING_CODES = (
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
)
# Why a worker is refused: its pages fit none of the other role's, it is of another role or model, or it can't be read.
LAYOUT, IDENTITY, MESSAGE = "layout", "identity", "message"


class RouterMetrics(Metrics):
    """What only the router sees."""

    def __init__(self) -> None:
        super().__init__()
        self._make_times()
        counter = partial(Counter, registry=self.registry)
        text = "Requests refused before they were begun, by reason."
        self._rejections = bound(counter("pageferry_rejections", text, ("reason",)), (*REJECTIONS, *_REJECTING_CODES))
        text = "Prefills that failed, by what was tried next."
        self._prefill_failures = bound(counter("pageferry_prefill_failures", text, ("next",)), RETRY_STEPS)
        text = "Requests that a worker, asked for room, had none for now, and that went back to the queue."
        self._returns = bound(counter("pageferry_returns", text, ("role",)), [role.value for role in Role])
        text = "Requests whose decode worker was lost, by what followed."
        self._resumes = bound(counter("pageferry_resumes", text, ("outcome",)), RESUME_OUTCOMES)
        text = "Requests whose objective for the first token, or between tokens, was met or missed, by profile."
        self._objectives = counter("pageferry_slo", text, ("profile", "objective", "result"))
        text = "Switches of a profile to the one in effect."
        self._objectives_of: dict[tuple[str, str], dict[bool, Counter]] = {}
        self._switches = counter("pageferry_profile_switches", text, ("profile", "to"))
        self._make_readings()

    def _make_times(self) -> None:
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        self.ttft_s = histogram("pageferry_time_to_first_token_seconds", "Arrival to first token.")
        text = "What the time to first token is made of, by part, of requests that went well; the sum is that time."
        parts = histogram("pageferry_first_token_part_seconds", text, ("part",))
        self._first_parts = bound(parts, FIRST_TOKEN_PARTS)
        text = "What the gap before the second token is made of, by part, where pages were handed over."
        parts = histogram("pageferry_second_token_part_seconds", text, ("part",))
        self._second_parts = bound(parts, SECOND_TOKEN_PARTS)
        text = "Gap between tokens of a stream; those that come together count once."
        self.itl_s = histogram("pageferry_inter_token_seconds", text)
        self.request_s = histogram("pageferry_request_seconds", "Arrival to last token.")
        self.queue_s = histogram("pageferry_queue_seconds", "Each wait in the router's queue, in vain or not.")

    def _make_readings(self) -> None:
        reading = partial(Reading, registry=self.registry)
        text = "1 for the profile in effect for each that is asked for."
        self._profiles = reading("pageferry_profile_info", text, ("profile", "in_effect"))
        self._queued = reading("pageferry_queued_requests", "Requests that wait for workers.", ("profile",))
        self._running = reading("pageferry_running_requests", "Requests that workers compute.", ("profile",))
        self._workers = reading("pageferry_workers", "Workers by what the router knows of them.", ("role", "state"))
        text = "Workers that are refused, by what does not fit."
        self._refused = reading("pageferry_workers_refused", text, ("role", "reason"))

    def follow(self, workers: Callable[[], Iterable[Worker]], profiles: Callable[[], Iterable[ProfileStatus]]) -> None:
        """Ask for the workers, and for the queue by profile, whenever metrics are read."""
        self._queued.read = lambda: [((status.name,), status.queued) for status in profiles()]
        self._running.read = lambda: [((status.name,), status.running) for status in profiles()]
        self._workers.read = lambda: _by_state(workers())
        self._refused.read = lambda: _by_misfit(workers())

    def observe_first_token(self, parts_ms: Mapping[str, float]) -> None:
        """Of a request that went well."""
        for part, series in self._first_parts.items():
            series.observe(parts_ms[part] / 1000)

    def observe_second_token(self, parts_ms: Mapping[str, float]) -> None:
        """Of one that went well and was handed over; none where it had no second token, or both came together."""
        for part, series in self._second_parts.items():
            if part in parts_ms:
                series.observe(parts_ms[part] / 1000)

    def count_rejection(self, error: PageferryError) -> None:
        """A request got no token; whether it was refused, or failed, its error says."""
        reason = error.reason if error.reason in REJECTIONS else error.code
        if reason in self._rejections:
            self._rejections[reason].inc()

    def count_refusal(self, error: PageferryError) -> None:
        """A request ended before it had a span."""
        self.count_request(error.code.lower())
        self.count_rejection(error)

    def count_prefill_failure(self, next_step: str) -> None:
        """`next_step` is one of RETRY_STEPS."""
        self._prefill_failures[next_step].inc()

    def count_return(self, role: Role) -> None:
        self._returns[role.value].inc()

    def count_resume(self, outcome: str) -> None:
        """`outcome` is one of RESUME_OUTCOMES."""
        self._resumes[outcome].inc()

    def count_objective(self, profile: str, objective: str, *, met: bool) -> None:
        """`profile` is one of the configuration's, `objective` is "ttft" or "token"."""
        results = self._objectives_of.get((profile, objective))
        if results is None:  # both at once, so that a ratio of either is told
            series = {result: self._objectives.labels(profile, objective, name) for result, name in RESULTS.items()}
            results = self._objectives_of[profile, objective] = series
        results[met].inc()

    def count_profile_switch(self, profile: str, to: str) -> None:
        """Both are names of the configuration's."""
        self._switches.labels(profile, to).inc()

    def set_profiles(self, in_effect: Mapping[str, str]) -> None:
        """The profile in effect, by that asked for."""
        told = [(pair, 1.0) for pair in in_effect.items()]
        self._profiles.read = lambda: told


def _by_state(workers: Iterable[Worker]) -> list[tuple[Sequence[str], float]]:
    numbers = Numbers((worker.role, worker.state) for worker in list(workers))
    return [((role.value, state.value), numbers[role, state]) for role in Role for state in WorkerState]


def _by_misfit(workers: Iterable[Worker]) -> list[tuple[Sequence[str], float]]:
    numbers = Numbers((worker.role, _misfit(worker)) for worker in list(workers) if worker.state is WorkerState.REFUSED)
    reasons = (LAYOUT, IDENTITY, MESSAGE)
    return [((role.value, reason), numbers[role, reason]) for role in Role for reason in reasons]


def _misfit(worker: Worker) -> str:
    if not worker.misfit:
        return MESSAGE
    return IDENTITY if worker.own_misfit() else LAYOUT
