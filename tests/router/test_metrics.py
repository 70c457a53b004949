"""What the router's metrics say of requests, its queue and its workers, and what observing costs a token."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asking
import pytest
from fake_engine import LAYOUT
from fake_workers import MODEL, TOKENS, Rig, Script
from gateway import client_of
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.router.metrics import FIRST_TOKEN_PARTS, SECOND_TOKEN_PARTS, RouterMetrics
from pageferry.runtime.trace_store import REQUEST_SPAN

TTFT = "pageferry_time_to_first_token_seconds"
ask = partial(asking.ask, max_tokens=8)


async def test_the_parts_of_the_time_to_first_token_add_up_to_it(router: Rig) -> None:
    for _ in range(3):
        await router.generate(ask())
    assert router.value(f"{TTFT}_count") == 3
    parts = [router.value("pageferry_first_token_part_seconds_sum", part=part) for part in FIRST_TOKEN_PARTS]
    assert sum(parts) == pytest.approx(router.value(f"{TTFT}_sum"), rel=0.01)
    for part in FIRST_TOKEN_PARTS:
        assert router.value("pageferry_first_token_part_seconds_count", part=part) == 3
    assert router.value("pageferry_queue_seconds_count") == 3


async def test_the_second_tokens_parts_are_those_on_spans(router: Rig) -> None:
    for _ in range(3):
        await router.generate(ask())
    said = [dict(span.attributes or {}) for span in router.log.spans if span.name == REQUEST_SPAN]
    for part in SECOND_TOKEN_PARTS:
        on_spans: list[Any] = [attributes[f"pageferry.second_token.{part}_ms"] for attributes in said]
        assert router.value("pageferry_second_token_part_seconds_count", part=part) == len(on_spans) == 3
        assert router.value("pageferry_second_token_part_seconds_sum", part=part) * 1000 == pytest.approx(sum(on_spans))


async def test_what_is_refused_counts_by_reason_and_what_fails_does_not(router: Rig) -> None:
    with pytest.raises(InvalidArgumentError):
        await router.generate(ask(max_tokens=1 << 20))
    assert router.value("pageferry_rejections_total", reason="TOO_LONG") == 1
    router.metrics.count_rejection(UnavailableError("a worker died", reason="WORKER_LOST"))
    values = {sample.labels.get("reason"): sample.value for sample in samples(router.metrics, "pageferry_rejections")}
    assert sum(values.values()) == 1
    assert values["QUEUE_FULL"] == 0


def test_what_missed_an_objective_is_told_where_all_met_it() -> None:
    metrics = RouterMetrics()
    metrics.count_objective("chat", "ttft", met=True)
    values = {sample.labels["result"]: sample.value for sample in samples(metrics, "pageferry_slo")}
    assert values == {"met": 1, "missed": 0}


async def test_workers_and_the_queue_are_read_when_metrics_are(tiny_model: Path) -> None:
    other = replace(LAYOUT, page_size=2 * LAYOUT.page_size)
    async with Rig(str(tiny_model), Script(TOKENS), num_decode=2, decode_layouts=[other], wait_ready=False) as router:
        await router.until(lambda: router.value("pageferry_workers_refused", role="decode", reason="layout") == 1)
        await router.until(lambda: router.value("pageferry_workers", role="decode", state="ready") == 1)
        assert router.value("pageferry_workers", role="decode", state="refused") == 1
        assert router.value("pageferry_workers", role="prefill", state="ready") == 1
        assert len(samples(router.metrics, "pageferry_workers")) == 12
        names = {sample.labels["profile"] for sample in samples(router.metrics, "pageferry_queued_requests")}
        assert names == {"interactive", "throughput", "quality"}


async def test_a_worker_of_another_model_is_refused_for_what_it_is(router: Rig) -> None:
    router.decode.snapshot.model = f"not-{MODEL}"
    router.decode.restart()
    await router.decode.server.__aexit__(None, None, None)
    await router.serve(router.decode, router.log.tracer())
    await router.until(lambda: router.value("pageferry_workers_refused", role="decode", reason="identity") == 1)
    assert router.value("pageferry_workers_refused", role="decode", reason="layout") == 0


async def test_exemplars_lead_to_traces_where_the_scraper_takes_them(router: Rig) -> None:
    answer = await router.generate(ask())
    assert answer.started is not None
    async with client_of(router.frontend, router.metrics.registry) as http:
        accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
        response = await http.get("/metrics", headers=accept)
        plain = await http.get("/metrics")
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "trace_id" not in plain.text
    found = {
        sample.name.removesuffix("_bucket"): sample.exemplar.labels
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert found[TTFT] == found["pageferry_request_seconds"] == {"trace_id": answer.started.trace_id}
    assert found["pageferry_queue_seconds"] == found[TTFT]


async def test_no_token_looks_a_series_up(router: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is the same for all tokens; what a request looks up does not depend on how many it has."""
    await router.generate(ask())
    looked_up = []
    labels = MetricWrapperBase.labels

    def noting(self: Any, *values: object, **names: object) -> Any:
        looked_up.append(values)
        return labels(self, *values, **names)

    monkeypatch.setattr(MetricWrapperBase, "labels", noting)
    answer = await router.generate(ask(max_tokens=30))
    assert len(answer.token_ids) == 30
    assert router.value("pageferry_inter_token_seconds_count") > 30
    assert looked_up == []


def samples(metrics: RouterMetrics, name: str) -> list[Any]:
    families = [family for family in metrics.registry.collect() if family.name == name]
    return [sample for family in families for sample in family.samples]
