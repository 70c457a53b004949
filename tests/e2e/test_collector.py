"""Spans go to a collector where one is configured; what one that is away costs is in faults/cases/test_tracing.py."""

from pathlib import Path

import pytest
from cluster import connected, generate, greedy, running
from collectors import collecting
from traces import SPLIT_SPANS, counts, orphans


@pytest.mark.field("open-telemetry/opentelemetry-python#4215", "open-telemetry/opentelemetry-python#1567")
async def test_every_process_that_up_starts_sends_its_spans_and_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        settings = {"router.local_prefill_tokens": "0"}
        arguments = ("--prefill", "1", "--decode", "1", "--model", str(tiny_model))
        with running(*arguments, settings=settings) as cluster:
            async with connected(cluster) as stub:
                await generate(stub, greedy([8] * 60, 5))
            spans = sink.wait(lambda spans: not SPLIT_SPANS - counts(spans))
    assert len({span.service for span in spans}) == 3
    assert orphans(spans) == []
