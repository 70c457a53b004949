"""The pool's size: from either setting, never too small for a request, never more than the machine has."""

import math

import pytest

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import CacheLayout
from pageferry.core.memory import MemoryPlan, plan_memory, unpacked_bytes
from pageferry.core.model_config import ModelConfig
from pageferry.runtime.staging import MAX_STAGED_BYTES

MODEL = ModelConfig("m", "llama", 1000, 64, 2, 4, 2, 16, 128, 8192, 1e-5, 1e4, tied_embeddings=True)
ROOM = 10**9


def layout(page_format: str = "int8", cache_layers: str = "") -> CacheLayout:
    return CacheLayout("f", PageFormat.parse(page_format), 16, 2, 16, parse_groups(cache_layers, 2, None))


LAYOUT = layout()
PAGE_BYTES = LAYOUT.pages[0].page_bytes


def plan(
    available: int = ROOM, of: CacheLayout = LAYOUT, scheduler: SchedulerConfig | None = None, **settings: float | str
) -> MemoryPlan:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return plan_memory(MODEL, of, config, scheduler or SchedulerConfig(), unpacked_bytes(MODEL, 4), available)


def test_the_pool_is_sized_from_either_setting() -> None:
    assert plan(num_pages=7).num_pages == (7,)
    assert plan(kv_memory_mb=3).num_pages == (3_000_000 // PAGE_BYTES,)


def test_the_report_is_a_sum() -> None:
    report = plan(num_pages=100).report
    terms = {name: value for name, value in report.items() if name not in ("total", "available")}
    assert set(terms) == {"weights", "rotary", "workspace", "pages", "drafts"}
    assert report["drafts"] == 4 * 128 * 1000  # logits of as many drafts as a step may have
    assert "drafts" not in plan(num_pages=100, speculation="off").report
    assert report["total"] == sum(terms.values())
    assert report["pages"] == 100 * PAGE_BYTES
    # The tied head is repacked, so that the embedding counts twice.
    assert report["weights"] == 4 * (2 * 1000 * 64 + 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64))


@pytest.mark.parametrize("num_pages", [1, 511])
@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_a_pool_too_small_for_one_request_names_the_smallest(num_pages: int) -> None:
    limit = 0 if num_pages == 1 else 8192
    with pytest.raises(InvalidArgumentError, match=f"has {num_pages} pages .* num_pages to at least") as caught:
        plan(num_pages=num_pages, max_model_tokens=limit)
    assert caught.value.message.endswith(f"at least {2 if limit == 0 else 512}")
    assert plan(num_pages=num_pages + 1, max_model_tokens=limit).num_pages == (num_pages + 1,)


@pytest.mark.parametrize("available", [-(2**30), 0, 10**6])
@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_too_little_memory_names_every_term(available: int) -> None:
    with pytest.raises(ResourceExhaustedError) as caught:
        plan(available, kv_memory_mb=512)
    message = caught.value.message
    assert all(term in message for term in ("weights", "rotary", "workspace", "pages 512 MB", "available"))
    assert "smallest workable kv_memory_mb is 1" in message


@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_what_fits_exactly_fits() -> None:
    total = plan(num_pages=100).report["total"]
    assert plan(total, num_pages=100).num_pages == (100,)
    with pytest.raises(ResourceExhaustedError):
        plan(total - 1, num_pages=100)


AUTOMATIC = {"kv_memory_mb": 0}


def test_without_a_size_the_pool_takes_what_is_there() -> None:
    found = plan(5 * 10**7, **AUTOMATIC)
    limit = found.report["available"]
    assert limit == int(0.9 * 5 * 10**7)
    assert limit - PAGE_BYTES - 16 * MODEL.head_dim * 4 < found.report["total"] <= limit, "another page does not fit"
    assert found.num_pages < (32 * 512,)


def test_without_a_size_the_pool_has_no_more_than_all_sequences_at_once_can_fill() -> None:
    assert plan(10**12, **AUTOMATIC).num_pages == (32 * 512,)
    assert plan(10**12, scheduler=SchedulerConfig(max_num_seqs=3), **AUTOMATIC).num_pages == (3 * 512,)
    windows = layout(cache_layers="0-1=window:256")
    assert plan(10**12, windows, **AUTOMATIC).num_pages == plan(of=windows, kv_memory_mb=10_000).num_pages


def test_workers_of_one_machine_share_what_is_there() -> None:
    whole, half = plan(5 * 10**7, **AUTOMATIC), plan(10**8, memory_share=0.5, **AUTOMATIC)
    assert half == whole
    assert plan(kv_memory_mb=3, memory_share=0.5) == plan(kv_memory_mb=3), "a size that is given is not divided"


@pytest.mark.parametrize("available", [-(2**30), 0, 10**6])
@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_without_a_size_too_little_memory_names_every_term(available: int) -> None:
    with pytest.raises(ResourceExhaustedError) as caught:
        plan(available, **AUTOMATIC)
    message = caught.value.message
    assert all(term in message for term in ("weights", "rotary", "workspace", "pages 0 MB", "available"))
    assert "the smallest workable kv_memory_mb is 1" in message


@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_without_a_size_a_request_of_the_longest_text_fits_or_nothing_starts() -> None:
    least = plan(num_pages=512, max_model_tokens=8192).report["total"]
    assert plan(math.ceil(least / 0.9), max_model_tokens=8192, **AUTOMATIC).num_pages == (512,)
    with pytest.raises(ResourceExhaustedError, match="the smallest workable kv_memory_mb is 2"):
        plan(math.floor(least / 0.9) - 1, max_model_tokens=8192, **AUTOMATIC)


def test_memory_that_is_shared_with_senders_is_a_term() -> None:
    without = plan(num_pages=100)
    settings = EngineConfig(num_pages=100)
    weights = unpacked_bytes(MODEL, 4)
    found = plan_memory(MODEL, LAYOUT, settings, SchedulerConfig(), weights, ROOM, MAX_STAGED_BYTES)
    assert found.report["staging"] == MAX_STAGED_BYTES
    assert found.report["total"] == without.report["total"] + MAX_STAGED_BYTES
    with pytest.raises(ResourceExhaustedError, match="staging 269 MB"):
        plan_memory(MODEL, LAYOUT, settings, SchedulerConfig(), weights, MAX_STAGED_BYTES, MAX_STAGED_BYTES)


def test_a_window_takes_no_more_than_sequences_can_hold() -> None:
    """Two pages of sinks' and window's tokens at most, and one of a chunk's 256; for 32 sequences, and a quarter."""
    selective = layout(cache_layers="0=window:20,sinks:4;1=full")
    most = 32 * (1 + 19) * 5 // 4
    one_layer = selective.pages[0].page_bytes
    few, many = plan(of=selective, kv_memory_mb=1), plan(of=selective, kv_memory_mb=64)
    assert few.num_pages == (10**6 // (2 * one_layer),) * 2
    assert many.num_pages == (most, (64 * 10**6 - most * one_layer) // one_layer)
    assert many.report["pages"] == sum(many.num_pages) * one_layer
    windows = layout(cache_layers="0-1=window:20")
    assert plan(of=windows, kv_memory_mb=64).num_pages == (32 * 19 * 5 // 4,)


def test_a_window_needs_room_for_one_sequence_only() -> None:
    windows = layout(cache_layers="0-1=window:20")
    with pytest.raises(InvalidArgumentError, match="one request needs 19"):
        plan(of=windows, num_pages=18, max_model_tokens=8192)
    assert plan(of=windows, num_pages=19, max_model_tokens=8192).num_pages == (19,)


def test_windows_alone_need_no_headroom() -> None:
    windows, roomy = layout(cache_layers="0-1=window:20"), SchedulerConfig(headroom_pages=30)
    assert plan(of=windows, scheduler=roomy, num_pages=19, max_model_tokens=8192).num_pages == (19,)
    with pytest.raises(InvalidArgumentError, match="one request needs 31"):
        plan(scheduler=roomy, num_pages=19)


def test_tails_are_a_term() -> None:
    channel = layout("int8:channel")
    found = plan(of=channel, kv_memory_mb=3)
    assert found.num_tails == 64
    assert found.report["tails"] == 64 * channel.tails[0].page_bytes
    assert found.num_pages == ((3_000_000 - found.report["tails"]) // channel.pages[0].page_bytes,)
    with pytest.raises(InvalidArgumentError, match="one request needs 500: set kv_memory_mb to at least 2,"):
        plan(of=channel, kv_memory_mb=1, max_model_tokens=8000)
    assert plan(num_pages=7).num_tails == 0
