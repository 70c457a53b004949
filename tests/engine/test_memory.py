"""The pool's size: from either setting, never too small for a request, never more than the machine has."""

import pytest

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
from pageferry.core.model_config import ModelConfig
from pageferry.engine import memory
from pageferry.engine.memory import MemoryPlan, available_bytes, plan_memory, unpacked_bytes

MODEL = ModelConfig("m", "llama", 1000, 64, 2, 4, 2, 16, 128, 8192, 1e-5, 1e4, tied_embeddings=True)
LAYOUT = PageLayout("f", PageFormat.parse("int8"), 16, 2, 2, 16)
ROOM = 10**9


def plan(monkeypatch: pytest.MonkeyPatch, available: int = ROOM, **settings: int) -> MemoryPlan:
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return plan_memory(MODEL, LAYOUT, config, SchedulerConfig(), unpacked_bytes(MODEL, 4))


def test_the_pool_is_sized_from_either_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, num_pages=7).num_pages == 7
    assert plan(monkeypatch, kv_memory_mb=3).num_pages == 3_000_000 // LAYOUT.page_bytes


def test_the_report_is_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    report = plan(monkeypatch, num_pages=100).report
    terms = {name: value for name, value in report.items() if name not in ("total", "available")}
    assert set(terms) == {"weights", "rotary", "workspace", "pages"}
    assert report["total"] == sum(terms.values())
    assert report["pages"] == 100 * LAYOUT.page_bytes
    # The tied head is repacked, so that the embedding counts twice.
    assert report["weights"] == 4 * (2 * 1000 * 64 + 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64))


@pytest.mark.parametrize("num_pages", [1, 511])
def test_a_pool_too_small_for_one_request_names_the_smallest(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    limit = 0 if num_pages == 1 else 8192
    with pytest.raises(InvalidArgumentError, match=f"has {num_pages} pages .* num_pages to at least") as caught:
        plan(monkeypatch, num_pages=num_pages, max_model_tokens=limit)
    assert caught.value.message.endswith(f"at least {2 if limit == 0 else 512}")
    assert plan(monkeypatch, num_pages=num_pages + 1, max_model_tokens=limit).num_pages == num_pages + 1


@pytest.mark.parametrize("available", [-(2**30), 0, 10**6])
def test_too_little_memory_names_every_term(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    with pytest.raises(ResourceExhaustedError) as caught:
        plan(monkeypatch, available, kv_memory_mb=512)
    message = caught.value.message
    assert all(term in message for term in ("weights", "rotary", "workspace", "pages 512 MB", "available"))
    assert "smallest workable kv_memory_mb is 1" in message


def test_what_fits_exactly_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    total = plan(monkeypatch, num_pages=100).report["total"]
    assert plan(monkeypatch, total, num_pages=100).num_pages == 100
    with pytest.raises(ResourceExhaustedError):
        plan(monkeypatch, total - 1, num_pages=100)


def test_the_machine_says_what_is_available() -> None:
    assert 0 < available_bytes() < 2**50
