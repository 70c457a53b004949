"""Metrics: bounded labels, gauges that are never negative, buckets that tell short from long."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pageferry.runtime.metrics import Metrics, RouterMetrics, WorkerMetrics
from pageferry.v1.inference_pb2 import PoolLoad, WorkerLoad


def samples(metrics: Metrics) -> dict[str, float]:
    return {
        ",".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_outcomes_are_a_fixed_set() -> None:
    metrics = Metrics()
    for outcome in ("stop", "length", "made up", "also made up"):
        metrics.count_request(outcome)
    values = samples(metrics)
    assert values["pageferry_requests_total,stop"] == 1
    assert values["pageferry_requests_total,other"] == 2
    assert not any("made up" in name for name in values)


def test_a_load_sets_gauges_and_counts_preemptions_once() -> None:
    metrics = WorkerMetrics()
    pools = [
        PoolLoad(group=0, pages_free=5, pages_cached=1, pages_reserved=2, pages_resident=3),
        PoolLoad(group=1, pages_free=7),
        PoolLoad(pages_resident=4),
    ]
    load = WorkerLoad(pools=pools, waiting=4, running=6, preemptions=2)
    metrics.set_load(load)
    metrics.set_load(load)
    load.preemptions, load.running = 3, 0
    metrics.set_load(load)
    values = samples(metrics)
    for pool, expected in (("0", [5, 1, 2, 3]), ("1", [7, 0, 0, 0]), ("tails", [0, 0, 0, 4])):
        states = ("free", "cached", "reserved", "resident")
        assert [values[f"pageferry_pages,{pool},{state}"] for state in states] == expected
    assert values["pageferry_sequences,waiting"] == 4
    assert values["pageferry_sequences,running"] == 0
    assert values["pageferry_preemptions_total"] == 3


def test_counts_of_tokens_and_hand_offs() -> None:
    metrics = WorkerMetrics()
    metrics.count_tokens(prompt=10, cached=4)
    metrics.count_tokens(generated=3)
    metrics.count_handoff(pages=2, num_bytes=4096, tail_s=0.02)
    metrics.count_broken_handoff()
    values = samples(metrics)
    assert [values[f"pageferry_tokens_total,{kind}"] for kind in ("prompt", "cached", "generated")] == [10, 4, 3]
    assert values["pageferry_handoff_bytes_total"] == 4096
    assert values["pageferry_handoff_pages_total"] == 2
    assert values["pageferry_handoff_failures_total"] == 1
    assert values["pageferry_handoff_tail_seconds_count"] == 1


@pytest.mark.parametrize("seconds", [0.04, 5.0, 200.0])
def test_buckets_tell_a_time_within_a_factor_of_two_and_a_half(seconds: float) -> None:
    metrics = RouterMetrics()
    metrics.ttft_s.observe(seconds)
    name = "pageferry_time_to_first_token_seconds_bucket,"
    bounds = {float(key.removeprefix(name)): value for key, value in samples(metrics).items() if key.startswith(name)}
    upper = min(bound for bound, count in bounds.items() if count)
    lower = max(bound for bound, count in bounds.items() if not count)
    assert lower < seconds <= upper <= 2.5 * lower


def test_a_process_has_no_metrics_that_it_never_sets() -> None:
    shared = samples(Metrics()).keys()
    router, worker = samples(RouterMetrics()).keys() - shared, samples(WorkerMetrics()).keys() - shared
    assert not router & worker
    assert not any("handoff" in name or "preemptions" in name for name in router)
    assert not any("first_token" in name or "pageferry_request_seconds" in name for name in worker)


def test_drafts_are_counted_and_tokens_of_steps_are_a_histogram() -> None:
    metrics = WorkerMetrics()
    assert samples(metrics)["pageferry_draft_tokens_total,proposed"] == 0
    metrics.count_drafts(20, 15, 25)
    metrics.count_drafts(0, 0, 10)
    metrics.count_drafts(0, 0, 0)  # it never ran
    metrics.count_drafts(4, 3, 3)  # its last tokens have not come
    values = samples(metrics)
    assert values["pageferry_draft_tokens_total,proposed"] == 24
    assert values["pageferry_draft_tokens_total,accepted"] == 18
    assert (values["pageferry_tokens_per_step_count"], values["pageferry_tokens_per_step_sum"]) == (2, 3.5)
