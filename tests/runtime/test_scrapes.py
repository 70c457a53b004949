"""Scrapes that come at the same time share what is rendered, and none gets less than was counted before it."""

import asyncio
import gzip
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_frontend import FakeFrontend
from fake_workers import eventually
from gateway import client_of
from loopback import free_port
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pageferry.runtime import scrapes as scrapes_module
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.scrapes import Scrapes

PATIENCE_S = 60


class Gate(Collector):
    """Counts how often it was read; the first time it waits for `open`."""

    def __init__(self) -> None:
        self.num_reads, self.value = 0, 1.0
        self.entered, self.open = threading.Event(), threading.Event()

    def collect(self) -> Iterator[CounterMetricFamily]:
        self.num_reads += 1
        value = self.value
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        yield CounterMetricFamily("pageferry_things", "Things.", value=value)

    def describe(self) -> list[Any]:
        return []


@pytest.fixture
def gate() -> Gate:
    return Gate()


def scrapes_of(gate: Gate, rests: list[float]) -> Scrapes:
    registry = CollectorRegistry()
    registry.register(gate)
    return Scrapes(registry, rests.append)


def test_a_flood_is_rendered_once_for_each_form_and_with_all_that_was_counted_before(gate: Gate) -> None:
    scrapes = scrapes_of(gate, [])
    first, content_type = scrapes.ask("")
    assert gate.entered.wait(PATIENCE_S)
    gate.value = 2
    others = [scrapes.ask("text/plain; version=" + "0" * number)[0] for number in range(100)]
    gate.open.set()
    assert b"pageferry_things_total 1.0" in first.result(PATIENCE_S)
    assert content_type.startswith("text/plain")
    assert all(b"pageferry_things_total 2.0" in one.result(PATIENCE_S) for one in others)
    assert gate.num_reads == 2
    gate.value = 3
    assert b"pageferry_things_total 3.0" in scrapes.ask("")[0].result(PATIENCE_S)
    assert gate.num_reads == 3


def test_versions_of_a_form_are_one_form(gate: Gate) -> None:
    scrapes = scrapes_of(gate, [])
    first, _ = scrapes.ask("")
    assert gate.entered.wait(PATIENCE_S)
    asked = [scrapes.ask(f"application/openmetrics-text; version=1.0.{number}") for number in range(50)]
    gate.open.set()
    assert all(text.result(PATIENCE_S).endswith(b"# EOF\n") for text, _ in asked)
    assert {content_type for _, content_type in asked} == {"application/openmetrics-text; version=1.0.0; charset=utf-8"}
    assert (b"# EOF" in first.result(PATIENCE_S), gate.num_reads) == (False, 2)


def test_it_rests_nine_times_as_long_as_it_was_at_work_and_no_longer(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, rests, now = iter([1.0, 1.5, 4.0, 4.25, 7.0, 7.5]), [], [100.0]
    monkeypatch.setattr(scrapes_module.time, "thread_time", lambda: next(busy))
    registry = CollectorRegistry()
    registry.register(gate)
    scrapes = Scrapes(registry, rests.append, lambda: now[0])
    gate.open.set()
    for passed_s in (1.0, 15.0, 0.0):  # until the next one
        scrapes.ask("")[0].result(PATIENCE_S)
        now[0] += passed_s
    assert rests == [0.0, 3.5, 0.0]


def test_what_fails_fails_for_who_asked_and_not_for_the_next(gate: Gate) -> None:
    scrapes = scrapes_of(gate, [])
    gate.open.set()
    gate.value = "no number"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no number"):
        scrapes.ask("")[0].result(PATIENCE_S)
    gate.value = 4
    assert b"pageferry_things_total 4.0" in scrapes.ask("")[0].result(PATIENCE_S)


def test_the_port_for_metrics_shares_and_packs_them() -> None:
    port = free_port()
    metrics = Metrics()
    metrics.serve("127.0.0.1", port)
    url = f"http://127.0.0.1:{port}/metrics"
    for headers, unpack in (({}, bytes), ({"accept-encoding": "gzip"}, gzip.decompress)):
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
            assert b"pageferry_requests_total" in unpack(answer.read())
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(urllib.request.Request(url, method="POST", data=b""), timeout=PATIENCE_S)


class Asked(FakeFrontend):
    """Counts who asked for what admins may see."""

    num_asked = 0

    def check_admin(self, authorization: Sequence[str], what: str) -> None:
        self.num_asked += 1


async def test_a_scraper_that_leaves_takes_the_text_from_no_other(gate: Gate) -> None:
    registry, frontend = CollectorRegistry(), Asked()
    registry.register(gate)
    async with client_of(frontend, registry) as client:
        first = asyncio.create_task(client.get("/metrics"))
        assert await asyncio.to_thread(gate.entered.wait, PATIENCE_S)
        leaving, staying = [asyncio.create_task(client.get("/metrics")) for _ in range(2)]
        await eventually(lambda: frontend.num_asked == 3)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gate.open.set()
        assert [(await one).status_code for one in (first, staying)] == [200, 200]
