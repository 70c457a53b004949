"""The queue to a collector: who ends a span waits for nothing, and each span is sent once or counted as lost once."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from pageferry.runtime import span_export
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.span_export import MAX_BATCH_SPANS, MAX_QUEUED_SPANS, SpanQueue

SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
PATIENCE_S = 60


class Collector:
    """Answers as it is told, and with success after that; while its gate is shut, not at all."""

    def __init__(self, *answers: SpanExportResult) -> None:
        self.calls: list[list[str]] = []  # names of the spans
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.called = threading.Semaphore(0)
        self.answer: Callable[[], None] = lambda: None  # before it does
        self.is_shut_down = False
        self._answers = deque(answers)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls.append([span.name for span in spans])
        self.threads.add(threading.current_thread().name)
        answer = self._answers.popleft() if self._answers else SUCCESS
        self.called.release()
        assert self.gate.wait(PATIENCE_S)
        self.answer()
        return answer

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "EXPORT_DELAY_S", 0.001)
    monkeypatch.setattr(span_export, "RETRY_S", 0.001)
    monkeypatch.setattr(span_export, "SHUTDOWN_S", PATIENCE_S)


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.INFO, "pageferry"):
        yield lambda: [record.getMessage() for record in caplog.records]


def end_spans(queue: SpanQueue, *names: str) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    for name in names:
        provider.get_tracer("test").start_span(name).end()


def numbered(first: int, number: int) -> list[str]:
    return [str(index) for index in range(first, first + number)]


def test_a_collector_that_does_not_answer_holds_up_no_end_of_a_span() -> None:
    collector, metrics = Collector(), Metrics()
    collector.gate.clear()
    queue = SpanQueue(collector, "away")
    queue.on_lost = metrics.count_lost_spans
    end_spans(queue, "first")
    assert collector.called.acquire(timeout=PATIENCE_S)
    end_spans(queue, *numbered(0, MAX_QUEUED_SPANS + 10))  # would never end if it waited
    assert len(queue) == MAX_QUEUED_SPANS + 1
    assert queue.num_lost == 10
    collector.gate.set()
    queue.shutdown()
    sent = Counter(name for call in collector.calls for name in call)
    assert sent == Counter(["first", *numbered(0, MAX_QUEUED_SPANS)])
    assert max(map(len, collector.calls)) <= MAX_BATCH_SPANS
    assert collector.threads == {"span-export"}
    assert queue.num_lost == 10
    assert metrics.registry.get_sample_value("pageferry_spans_lost_total") == 10


def test_a_batch_that_is_not_taken_is_sent_again(events: Callable[[], list[str]]) -> None:
    collector = Collector(FAILURE, FAILURE, FAILURE)
    queue = SpanQueue(collector, "starts again")
    end_spans(queue, "one")
    for _ in range(4):
        assert collector.called.acquire(timeout=PATIENCE_S)
    queue.shutdown()
    assert collector.calls == [["one"]] * 4
    assert queue.num_lost == 0
    assert events() == ["span_export_failing", "span_export_working"]
    assert collector.is_shut_down


def test_what_waits_is_sent_in_order_once_one_span_is_taken(events: Callable[[], list[str]]) -> None:
    collector = Collector(FAILURE)
    collector.gate.clear()
    queue = SpanQueue(collector, "starts again")
    end_spans(queue, "0")
    assert collector.called.acquire(timeout=PATIENCE_S)
    end_spans(queue, *numbered(1, 9))
    collector.gate.set()
    queue.shutdown()
    assert collector.calls == [["0"], ["0"], numbered(1, 9)]
    assert queue.num_lost == 0
    assert events() == ["span_export_failing", "span_export_working"]


@pytest.mark.parametrize(
    ("call_s", "num_calls"),
    [(span_export.EXPORT_TIMEOUT_S, 1), (span_export.REFUSED_S / 10, 10)],
    ids=["no answer in time, so that it may have arrived", "refused for too long"],
)
def test_a_span_is_lost_once(events: Callable[[], list[str]], call_s: float, num_calls: int) -> None:
    now = 0.0

    def take_long() -> None:
        nonlocal now
        now += call_s

    collector = Collector(*[FAILURE] * num_calls)
    collector.answer = take_long
    queue = SpanQueue(collector, "away", clock=lambda: now)
    end_spans(queue, "lost")
    for _ in range(num_calls):
        assert collector.called.acquire(timeout=PATIENCE_S)
    end_spans(queue, "sent")
    assert collector.called.acquire(timeout=PATIENCE_S)
    queue.shutdown()
    assert collector.calls == [["lost"]] * num_calls + [["sent"]]
    assert queue.num_lost == 1
    assert events() == ["span_export_failing", "span_export_working", "spans_lost"]


def test_the_end_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch, events: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(span_export, "SHUTDOWN_S", 0.01)
    collector = Collector()
    collector.gate.clear()
    queue = SpanQueue(collector, "away")
    end_spans(queue, "being sent")
    assert collector.called.acquire(timeout=PATIENCE_S)
    end_spans(queue, "waits")
    queue.shutdown()  # would never end if it waited
    assert collector.is_shut_down
    end_spans(queue, "too late")
    queue.shutdown()
    assert queue.num_lost == 3
    assert events() == ["spans_lost"]
    collector.gate.set()


def test_an_exporter_that_raises_ends_neither_the_thread_nor_the_spans_after_it() -> None:
    collector = Collector()
    failures = deque([1])

    def fail_once() -> None:
        if failures:
            failures.pop()
            raise OSError("no certificate")

    collector.answer = fail_once
    queue = SpanQueue(collector, "odd")
    end_spans(queue, "one")
    for _ in range(2):
        assert collector.called.acquire(timeout=PATIENCE_S)
    queue.shutdown()
    assert collector.calls == [["one"]] * 2
    assert queue.num_lost == 0


def test_what_is_not_sampled_is_not_sent() -> None:
    collector = Collector()
    queue = SpanQueue(collector, "idle")
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    provider.get_tracer("test").start_span("none").end()
    queue.shutdown()
    assert collector.calls == []
    assert queue.num_lost == 0
