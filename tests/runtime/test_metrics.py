"""Metrics: bounded labels, series that are there from the start, buckets that tell short from long."""

import urllib.request
from itertools import pairwise
from typing import Any

import pytest
from fake_engine import LAYOUT
from loopback import free_port
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pageferry.core.config import HandoffConfig
from pageferry.core.formats import PageFormat
from pageferry.core.layout import CacheLayout
from pageferry.core.sender import HandoffStats
from pageferry.router.metrics import RouterMetrics
from pageferry.runtime.carriers import INLINE, SHM
from pageferry.runtime.gpu_use import GpuUse, open_gpu
from pageferry.runtime.metrics import SECONDS, Metrics
from pageferry.runtime.push_report import RECEIVED, SENT, PushFigures
from pageferry.runtime.worker_metrics import StepFigures, WorkerFacts, WorkerMetrics
from pageferry.v1.inference_pb2 import PoolLoad, WorkerLoad


def samples(metrics: Metrics) -> dict[str, float]:
    return {
        ",".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }


def worker_metrics(layout: CacheLayout = LAYOUT) -> WorkerMetrics:
    metrics = WorkerMetrics()
    metrics.describe(WorkerFacts("decode", "tiny", "cpu", layout, 32))
    return metrics


def test_outcomes_are_a_fixed_set() -> None:
    metrics = Metrics()
    for outcome in ("stop", "length", "made up", "also made up"):
        metrics.count_request(outcome)
    values = samples(metrics)
    assert values["pageferry_requests_total,stop"] == 1
    assert values["pageferry_requests_total,other"] == 2
    assert values["pageferry_requests_total,internal"] == 0
    assert not any("made up" in name for name in values)


def test_a_load_is_read_when_metrics_are() -> None:
    layout = CacheLayout("f" * 32, PageFormat.parse("int8"), 16, 2, 64, LAYOUT.groups)
    metrics = worker_metrics(layout)
    pools = [PoolLoad(group=0, pages_free=5, pages_cached=1, pages_reserved=2, pages_resident=3)]
    load = WorkerLoad(pools=pools, waiting=4, running=6, preemptions=2, tickets=1)
    metrics.set_load(load)
    metrics.set_load(WorkerLoad(pools=pools, waiting=4, running=0, preemptions=3, tickets=1))
    values = samples(metrics)
    states = ("free", "cached", "reserved", "resident")
    assert [values[f"pageferry_pages,int8,0,{state}"] for state in states] == [5, 1, 2, 3]
    assert values["pageferry_sequences,waiting"] == 4
    assert values["pageferry_sequences,running"] == 0
    assert values["pageferry_tickets"] == 1
    assert values["pageferry_preemptions_total"] == 3
    page_bytes = layout.pages[0].page_bytes
    plain_bytes = 16 * 2 * 64 * 2 * 2 * layout.num_layers
    assert values["pageferry_page_bytes,int8,0"] == page_bytes
    assert values["pageferry_kv_saved_bytes"] == 6 * (plain_bytes - page_bytes) > 0
    assert values["pageferry_model_info,cpu,ffffffffffff,tiny,int8,decode"] == 1


def test_tails_count_against_what_a_format_saves() -> None:
    layout = CacheLayout("f", PageFormat.parse("int8:channel"), 16, 2, 64, LAYOUT.groups)
    metrics = worker_metrics(layout)
    metrics.set_load(WorkerLoad(pools=[PoolLoad(group=0, pages_resident=6), PoolLoad(pages_resident=2)]))
    values = samples(metrics)
    assert values["pageferry_pages,fp16,tails,resident"] == 2
    plain_bytes, tail_bytes = 16 * 2 * 64 * 2 * 2 * layout.num_layers, sum(tails.page_bytes for tails in layout.tails)
    assert values["pageferry_kv_saved_bytes"] == 6 * (plain_bytes - layout.pages[0].page_bytes) - 2 * tail_bytes > 0


@pytest.mark.parametrize(
    ("page_format", "pools"),
    [
        ("fp32", [PoolLoad(group=0, pages_resident=3)]),
        ("int8:channel", [PoolLoad(group=0), PoolLoad(pages_resident=2)]),
    ],
)
def test_where_nothing_is_saved_the_gauge_is_not_negative(page_format: str, pools: list[PoolLoad]) -> None:
    metrics = worker_metrics(CacheLayout("f", PageFormat.parse(page_format), 16, 2, 64, LAYOUT.groups))
    metrics.set_load(WorkerLoad(pools=pools))
    assert samples(metrics)["pageferry_kv_saved_bytes"] == 0


def test_a_push_counts_at_both_ends_by_how_it_travelled_and_ended() -> None:
    metrics = worker_metrics()
    stats = HandoffStats(2, 4096, tail_s=0.02, in_flight_s=0.3)
    metrics.count_push(PushFigures(SENT, SHM, 2, 4096, stalled_s=0.1, stats=stats))
    metrics.count_push(PushFigures(RECEIVED, INLINE, 3, 100))
    metrics.count_push(PushFigures(SENT, INLINE, 1, 50, stalled_s=7, failure="HANDOFF_EXPIRED"))
    metrics.count_push(PushFigures(SENT, INLINE, 0, 0, failure="A_REASON_OF_LATER_VERSIONS"))
    values = samples(metrics)
    assert values["pageferry_handoff_pages_total,sent,shm"] == 2
    assert values["pageferry_handoff_pages_total,sent,inline"] == 0
    assert values["pageferry_handoff_bytes_total,sent,inline"] == 50
    assert values["pageferry_handoff_bytes_total,received,inline"] == 100
    assert values["pageferry_handoff_stalled_seconds_total,shm"] == 0.1
    assert values["pageferry_handoff_stalled_seconds_total,inline"] == 7
    assert values["pageferry_handoff_seconds_count,shm"] == values["pageferry_handoff_tail_seconds_count"] == 1
    assert values["pageferry_handoff_failures_total,sent,HANDOFF_EXPIRED"] == 1
    assert values["pageferry_handoff_failures_total,sent,other"] == 1


def test_steps_are_histograms_of_time_sequences_and_tokens() -> None:
    metrics = worker_metrics()
    metrics.count_steps([StepFigures(3, 130, 0.04), StepFigures(1, 1, 0.002)])
    values = samples(metrics)
    assert values["pageferry_step_seconds_sum"] == pytest.approx(0.042)
    assert values["pageferry_step_sequences_sum"] == 4
    assert (values["pageferry_step_tokens_sum"], values["pageferry_step_tokens_count"]) == (131, 2)


def quantile(metrics: Metrics, name: str, share: float) -> float:
    """As PromQL's histogram_quantile computes it."""
    prefix = f"{name}_bucket,"
    buckets = {float(key.removeprefix(prefix)): n for key, n in samples(metrics).items() if key.startswith(prefix)}
    rank, lower, below = share * buckets[float("inf")], 0.0, 0.0
    for upper, count in sorted(buckets.items()):
        if count >= rank:
            return lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    raise AssertionError("no value")


def test_bounds_of_buckets_are_short_numbers() -> None:
    """They are the label `le`: 3 times 0.1 is 0.30000000000000004."""
    assert max(len(str(bound)) for bound in SECONDS) <= len("3600.0")


@pytest.mark.field("vllm-project/vllm#15167", "vllm-project/vllm#48175")
@pytest.mark.parametrize("seconds", [0.0011, 0.04, 0.31, 5.0, 11.0, 200.0, 600.0])
@pytest.mark.parametrize("name", ["pageferry_time_to_first_token_seconds", "pageferry_request_seconds"])
def test_quantiles_are_within_a_factor_of_two(name: str, seconds: float) -> None:
    metrics = RouterMetrics()
    series = metrics.ttft_s if "first_token" in name else metrics.request_s
    for _ in range(100):
        series.observe(seconds)
    for share in (0.5, 0.99):
        assert seconds / 2 <= quantile(metrics, name, share) <= 2 * seconds


@pytest.mark.field("vllm-project/vllm#15167", "vllm-project/vllm#48175")
def test_no_time_that_can_be_set_is_beyond_the_largest_bucket() -> None:
    """Callers' deadlines have no limit; those of hand-offs do, and are the longest that there are."""
    longest_s = SECONDS[-1]
    HandoffConfig(lease_ms=round(longest_s * 1000), reservation_ms=round(longest_s * 1000))
    with pytest.raises(Exception, match="lease_ms"):
        HandoffConfig(lease_ms=round(longest_s * 1000) + 1)
    assert SECONDS[0] == 0.001
    assert all(upper <= 2 * lower for lower, upper in pairwise(SECONDS))


def test_a_process_has_no_metrics_that_it_never_sets() -> None:
    shared = samples(Metrics()).keys()
    router, worker = samples(RouterMetrics()).keys() - shared, samples(worker_metrics()).keys() - shared
    assert not router & worker
    assert not any("handoff" in name or "preemptions" in name for name in router)
    assert not any("first_token" in name or "pageferry_request_seconds" in name for name in worker)


def test_drafts_are_counted_and_tokens_of_steps_are_a_histogram() -> None:
    metrics = worker_metrics()
    assert samples(metrics)["pageferry_draft_tokens_total,proposed"] == 0
    metrics.count_drafts(20, 15, 25)
    metrics.count_drafts(0, 0, 10)
    metrics.count_drafts(0, 0, 0)  # it never ran
    metrics.count_drafts(4, 3, 3)  # its last tokens have not come
    values = samples(metrics)
    assert values["pageferry_draft_tokens_total,proposed"] == 24
    assert values["pageferry_draft_tokens_total,accepted"] == 18
    assert (values["pageferry_tokens_per_step_count"], values["pageferry_tokens_per_step_sum"]) == (2, 3.5)


class FakeNvml:
    """The driver's library, with one GPU that says what it is told to."""

    def __init__(self, memory: int = 0, utilisation: int = 0) -> None:
        self.status = {"memory": memory, "utilisation": utilisation}
        self.opened: list[Any] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        self.opened.append(index.value)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        self.opened.append(name)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 100, 40
        return self.status["memory"]

    def nvmlDeviceGetUtilizationRates(self, handle: Any, share: Any) -> int:
        share._obj.gpu = 75
        return self.status["utilisation"]


def test_a_gpu_tells_its_memory_and_how_busy_it_is() -> None:
    metrics, nvml = worker_metrics(), FakeNvml()
    gpu = open_gpu("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, GPU-a-b"}, lambda _: nvml)
    assert isinstance(gpu, GpuUse)
    assert nvml.opened == [b"GPU-a-b"]
    assert open_gpu("cuda:0", {"CUDA_VISIBLE_DEVICES": "3"}, lambda _: nvml) is not None
    assert open_gpu("cuda:2", {}, lambda _: nvml) is not None
    assert nvml.opened[1:] == [3, 2]
    metrics.follow_gpu(gpu)
    values = samples(metrics)
    assert (values["pageferry_gpu_memory_bytes,used"], values["pageferry_gpu_memory_bytes,total"]) == (40, 100)
    assert values["pageferry_gpu_utilisation_ratio"] == 0.75


def test_what_a_driver_does_not_tell_is_left_out() -> None:
    metrics = worker_metrics()
    gpu = open_gpu("cuda:0", {}, lambda _: FakeNvml(utilisation=3))  # as of a part of a GPU
    assert gpu is not None
    metrics.follow_gpu(gpu)
    names = {name.partition(",")[0] for name in samples(metrics)}
    assert "pageferry_gpu_memory_bytes" in names
    assert "pageferry_gpu_utilisation_ratio" not in names
    assert open_gpu("cpu") is None

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert open_gpu("cuda:0", {}, missing) is None


@pytest.mark.parametrize("version", ["1.0.0", "words", "1.0.x"])
def test_the_port_for_metrics_answers_whatever_a_scraper_accepts(
    version: str, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    worker_metrics().serve("127.0.0.1", port)
    headers = {"accept": f"application/openmetrics-text; version={version}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert b"pageferry_requests_total" in answer.read()
    assert capfd.readouterr().err == ""
