"""A worker's metrics: its pools, its sequences and steps, and hand-offs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client import Counter, Histogram

from pageferry.core.layout import TAIL_FORMAT, CacheLayout
from pageferry.runtime.carriers import INLINE, SHM
from pageferry.runtime.gpu_use import GpuUse
from pageferry.runtime.metrics import OTHER, SECONDS, Metrics, Reading, bound
from pageferry.runtime.push_report import RECEIVED, SENT, PushFigures
from pageferry.v1.inference_pb2 import PoolLoad, WorkerLoad

_TOKENS_PER_STEP = (1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
_COUNTS = tuple(float(2**power) for power in range(15))  # of sequences or tokens: 1 to 16384
PAGE_STATES = ("free", "cached", "reserved", "resident")
# What breaks a hand-off; the reasons of errors.
HANDOFF_REASONS = (
    "BAD_SCALE",
    "CHECKSUM_MISMATCH",
    "HANDOFF_EXPIRED",
    "INTERNAL",
    "LAYOUT_MISMATCH",
    "NO_SHARED_MEMORY",
    "PUSH_ABORTED",  # by who sent it, as its request is over
    "PUSH_BROKEN",  # the same, as who receives it sees it
    "REQUEST_OVER",
    "STREAM_BROKEN",
    "UNAVAILABLE",
    "UNKNOWN_TICKET",
    OTHER,
)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change while a worker lives."""

    role: str
    model: str
    device: str
    layout: CacheLayout
    max_num_seqs: int

    @property
    def info(self) -> tuple[str, ...]:
        return self.model, self.role, self.device, str(self.layout.format), self.layout.fingerprint[:12]


@dataclass(slots=True)  # not frozen, which would take thrice as long to make at each step
class StepFigures:
    """Of a step."""

    num_sequences: int
    num_tokens: int  # that it computed, drafts among them
    seconds: float


class WorkerMetrics(Metrics):
    """What only a worker sees. What a load tells is read from the last one, whenever metrics are."""

    def __init__(self) -> None:
        super().__init__()
        self._load = WorkerLoad()
        self._facts: WorkerFacts | None = None
        self._make_work()
        self._make_loads()
        self._make_handoffs()

    def _make_work(self) -> None:
        histogram, counter = partial(Histogram, registry=self.registry), partial(Counter, registry=self.registry)
        text = "From when a sequence could run to its first step."
        self.queue_s = histogram("pageferry_worker_queue_seconds", text, buckets=SECONDS)
        self._step_s = histogram("pageferry_step_seconds", "What a step took.", buckets=SECONDS)
        self._step_sequences = histogram("pageferry_step_sequences", "Sequences in a step.", buckets=_COUNTS)
        text = "Tokens that a step computed: of prompts, of streams, and drafts."
        self._step_tokens = histogram("pageferry_step_tokens", text, buckets=_COUNTS)
        drafts = counter("pageferry_draft_tokens", "Drafts computed, and those accepted.", ("kind",))
        self._drafts = bound(drafts, ("proposed", "accepted"))
        text = "Tokens that a step gave, as a mean over an answer's steps."
        self._tokens_per_step = histogram("pageferry_tokens_per_step", text, buckets=_TOKENS_PER_STEP)

    def _make_loads(self) -> None:
        reading = partial(Reading, registry=self.registry)
        pool = ("pool", "format")
        text = "Pages by state, of a cache group or of tails."
        reading("pageferry_pages", text, ("state", *pool)).read = self._read_pages
        reading("pageferry_page_bytes", "Bytes of one page.", pool).read = self._read_page_bytes
        text = "Bytes that pages with something in them, and tails, take less than in 16 bits without tails; else 0."
        reading("pageferry_kv_saved_bytes", text).follow(self._saved_bytes)
        reading("pageferry_sequences", "Sequences, waiting or running.", ("state",)).read = lambda: [
            (("waiting",), self._load.waiting),
            (("running",), self._load.running),
        ]
        slots = reading("pageferry_max_sequences", "Most sequences that run at once.")
        slots.read = lambda: [] if self._facts is None else [((), self._facts.max_num_seqs)]
        text = "Prompt tokens accepted and not yet computed."
        reading("pageferry_queued_prompt_tokens", text).follow(lambda: self._load.queued_prompt_tokens)
        text = "Tickets issued for hand-offs whose pages are not all there."
        reading("pageferry_tickets", text).follow(lambda: self._load.tickets)
        preemptions = reading("pageferry_preemptions", "Sequences preempted.", is_counter=True)
        preemptions.follow(lambda: self._load.preemptions)
        text = "1 while the engine makes no progress, else 0."
        reading("pageferry_engine_stalled", text).follow(lambda: self._load.stalled)
        names = ("model", "role", "device", "page_format", "fingerprint")
        info = reading("pageferry_model_info", "1, with what the worker has loaded.", names)
        info.read = lambda: [] if self._facts is None else [(self._facts.info, 1)]
        text = "Memory of the worker's GPU: used, by whomever, and in all."
        self._gpu_memory = reading("pageferry_gpu_memory_bytes", text, ("kind",))
        text = "Share of the last moments in which the worker's GPU computed, where its driver tells."
        self._gpu_busy = reading("pageferry_gpu_utilisation_ratio", text)

    def _make_handoffs(self) -> None:
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        way = ("direction", "transport")
        pages = counter("pageferry_handoff_pages", "Pages of hand-offs that were complete.", way)
        num_bytes = counter("pageferry_handoff_bytes", "Bytes of pages that have left, or come.", way)
        failures = counter("pageferry_handoff_failures", "Hand-offs broken off.", ("direction", "reason"))
        text = "Seconds that hand-offs waited for their receiver to take pages."
        stalled_s = counter("pageferry_handoff_stalled_seconds", text, ("transport",))
        text = "What a hand-off took, while pages were on their way."
        in_flight_s = histogram("pageferry_handoff_seconds", text, ("transport",), buckets=SECONDS)
        self.handoff_s = histogram("pageferry_handoff_tail_seconds", "End of prefill to commit.", buckets=SECONDS)
        ways = [(direction, transport) for direction in (SENT, RECEIVED) for transport in (INLINE, SHM)]
        self._handoff_pages = {way: pages.labels(*way) for way in ways}
        self._handoff_bytes = {way: num_bytes.labels(*way) for way in ways}
        self._stalled_s = bound(stalled_s, (INLINE, SHM))
        self._in_flight_s = bound(in_flight_s, (INLINE, SHM))
        self._handoff_failures = {
            (direction, reason): failures.labels(direction, reason)
            for direction in (SENT, RECEIVED)
            for reason in HANDOFF_REASONS
        }

    def describe(self, facts: WorkerFacts) -> None:
        """Say what the worker has loaded, without which nothing is told of pages."""
        self._facts = facts

    def follow_gpu(self, gpu: GpuUse) -> None:
        self._gpu_memory.read = gpu.memory
        self._gpu_busy.read = gpu.utilisation

    def set_load(self, load: WorkerLoad) -> None:
        """The last load, which nobody changes any more."""
        self._load = load

    def count_push(self, push: PushFigures) -> None:
        """A push of pages is over, however it ended."""
        way = (push.direction, push.transport)
        self._handoff_bytes[way].inc(push.num_bytes)
        if push.direction == SENT:
            self._stalled_s[push.transport].inc(push.stalled_s)
        if push.failure is not None:
            reason = push.failure if push.failure in HANDOFF_REASONS else OTHER
            self._handoff_failures[push.direction, reason].inc()
            return
        self._handoff_pages[way].inc(push.pages)
        if push.stats is not None:
            self._in_flight_s[push.transport].observe(push.stats.in_flight_s, push.exemplar)
            self.handoff_s.observe(push.stats.tail_s, push.exemplar)

    def count_steps(self, steps: Iterable[StepFigures]) -> None:
        for step in steps:
            self._step_s.observe(step.seconds)
            self._step_sequences.observe(step.num_sequences)
            self._step_tokens.observe(step.num_tokens)

    def count_drafts(self, num_proposed: int, num_accepted: int, num_generated: int) -> None:
        """Of a sequence that is over, and has so many tokens drawn here: each accepted draft is one without a step.

        Steps that only computed a part of the prompt give no tokens, and do not count.
        """
        self._drafts["proposed"].inc(num_proposed)
        self._drafts["accepted"].inc(num_accepted)
        num_steps = num_generated - num_accepted
        if num_steps > 0:
            self._tokens_per_step.observe(num_generated / num_steps)

    def _pools(self) -> Iterator[tuple[tuple[str, str], PoolLoad, int, int]]:
        """Of each pool its labels, its load, a page's bytes, and what they would be in 16 bits."""
        if self._facts is None:
            return
        layout = self._facts.layout
        for pool in self._load.pools:
            if not pool.HasField("group"):
                num_bytes = sum(tails.page_bytes for tails in layout.tails)
                yield ("tails", str(TAIL_FORMAT)), pool, num_bytes, 0
                continue
            page = layout.pages[pool.group]
            plain = replace(page, format=TAIL_FORMAT)
            yield (str(pool.group), str(layout.format)), pool, page.page_bytes, plain.page_bytes

    def _read_pages(self) -> list[tuple[Sequence[str], float]]:
        return [
            ((state, *labels), getattr(pool, f"pages_{state}"))
            for labels, pool, *_ in self._pools()
            for state in PAGE_STATES
        ]

    def _read_page_bytes(self) -> list[tuple[Sequence[str], float]]:
        return [(labels, num_bytes) for labels, _, num_bytes, _ in self._pools()]

    def _saved_bytes(self) -> float:
        saved = sum(
            (plain_bytes - num_bytes) * (pool.pages_cached + pool.pages_reserved + pool.pages_resident)
            for _, pool, num_bytes, plain_bytes in self._pools()
        )
        return max(0, saved)
