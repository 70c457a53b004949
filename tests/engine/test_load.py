"""Loading: what an engine says of itself, what it refuses, and what tells two models apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engines import load, logits_of, sequence
from tiny_model import TinyShape, write_tiny_model

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from pageferry.core.formats import PageFormat
from pageferry.core.prefix import page_hashes
from pageferry.engine.load import load_engine
from pageferry.engine.loaders import compute_dtype


def test_an_engine_describes_itself(tiny_model: Path) -> None:
    lines: list[str] = []
    config = EngineConfig(
        model=str(tiny_model), page_size=8, num_pages=40, threads=1, compute_dtype="fp32", kernels="torch"
    )
    engine = load_engine(config, SchedulerConfig(), progress=lines.append)
    layout = engine.layout
    assert (layout.format, layout.page_size, layout.num_layers) == (PageFormat.parse("int8"), 8, 4)
    assert (layout.num_kv_heads, layout.head_dim, len(layout.fingerprint)) == (2, 16, 32)
    assert (engine.num_pages, engine.num_tails, engine.pages.num_bytes) == ((40,), 0, engine.memory_report["pages"])
    assert engine.model_config.name == tiny_model.name
    assert torch.get_num_threads() == 1
    assert len(lines) == 2
    assert "computes in float32, 40 int8 pages of 8 tokens, memory weights" in lines[-1]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (EngineConfig(model="/no/such/model"), NotFoundError, "no directory, no file"),
        (EngineConfig(max_model_tokens=9000), InvalidArgumentError, "max_model_tokens is 9000, .* 8192"),
    ],
)
def test_what_cannot_be_loaded(config: EngineConfig, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_engine(config, SchedulerConfig(), progress=lambda _: None)


def test_the_fingerprint_tells_models_apart(tiny_model: Path, tmp_path: Path) -> None:
    same = shutil.copytree(tiny_model, tmp_path / "another-name")
    weights = write_tiny_model(tmp_path / "weights", seed=1)
    shape = write_tiny_model(tmp_path / "shape", TinyShape(num_key_value_heads=4))
    rope = shutil.copytree(tiny_model, tmp_path / "rope")
    document = json.loads((rope / "config.json").read_text()) | {"rope_theta": 20000.0}
    (rope / "config.json").write_text(json.dumps(document))
    own = load(tiny_model).layout.fingerprint
    assert load(same).layout.fingerprint == own
    assert load(tiny_model, "int8", compute_dtype="bf16", num_pages=32).layout.fingerprint == own
    assert len({own, *(load(other).layout.fingerprint for other in (weights, shape, rope))}) == 4
    assert load(tiny_model, page_size=32, cache_layers="0-3=window:20").layout.fingerprint == own


@pytest.mark.field(
    "vllm-project/vllm#3264", "vllm-project/vllm#30931", "vllm-project/vllm#42125", "ggml-org/llama.cpp#26207"
)
def test_pages_of_other_weights_under_the_same_name_are_never_found(tmp_path: Path) -> None:
    engines = [load(write_tiny_model(tmp_path / str(seed) / "model", seed=seed), "int8") for seed in range(2)]
    assert len({engine.model_config.name for engine in engines}) == 1
    hashes = [page_hashes(range(4, 104), 16, salt="", layout_key=engine.layout.cache_key) for engine in engines]
    assert not set(hashes[0]) & set(hashes[1])
    with pytest.raises(FailedPreconditionError, match="fingerprint"):
        engines[0].layout.check_ships_to(engines[1].layout, ours="P", theirs="D")


def test_compute_types(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_dtype("fp32") is torch.float32
    assert compute_dtype("bf16") is torch.bfloat16
    for capabilities, expected in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
    ):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda found=capabilities: found)
        assert compute_dtype("auto") is expected


@pytest.mark.parametrize("head_dim", [80, 96])
@pytest.mark.parametrize("page_format", ["int4", "int8", "int8:channel:asym", "k=int8,v=int4:channel"])
def test_heads_of_any_size_are_quantised(page_format: str, head_dim: int, tmp_path: Path) -> None:
    """No group of numbers of a fixed size has to divide a head; the last page and half of one included."""
    shape = TinyShape(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=head_dim)
    directory = write_tiny_model(tmp_path, shape)
    tokens = [4 + (index * index * 31 + index * 7) % 300 for index in range(72)]
    exact = logits_of(load(directory), sequence(tokens, 0, 5), [72])
    engine = load(directory, page_format)
    assert engine.layout.head_dim == head_dim
    for ends in ([72], [50, *range(51, 73)]):
        error = (logits_of(engine, sequence(tokens, 1, 5), ends) - exact).norm() / exact.norm()
        assert 0 < error < (0.35 if "int4" in page_format else 0.02)


def test_what_a_format_can_not_hold_is_refused_at_start(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyShape(num_key_value_heads=1, head_dim=2))
    with pytest.raises(InvalidArgumentError, match=r"page_size is 1, .* multiples of 4"):
        load(directory, "k=int4,v=fp32", page_size=1)


@pytest.mark.parametrize(
    ("cache_layers", "message"),
    [
        ("0-4=full", "must be layers from 0 to 3"),
        ("0-1=full", "must name each of the 4 layers, once; missing: 2-3"),
        ("0-3=window:0", "window:0"),
    ],
)
def test_cache_layers_are_checked_against_the_model(cache_layers: str, message: str, tiny_model: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load(tiny_model, cache_layers=cache_layers)


def test_groups_and_tails_are_named_at_start(tiny_model: Path) -> None:
    lines: list[str] = []
    config = EngineConfig(
        model=str(tiny_model), page_format="int8:channel", cache_layers="0-1=window:20,sinks:4;2-3=full", num_pages=2000
    )
    engine = load_engine(config, SchedulerConfig(max_num_seqs=4), progress=lines.append)
    assert (engine.num_pages, engine.num_tails) == ((100, 2000), 8)
    assert engine.pages.num_bytes == engine.memory_report["pages"] + engine.memory_report["tails"]
    pages = "100 (0-1=window:20,sinks:4) + 2000 (2-3=full) int8:channel pages of 16 tokens"
    assert pages in lines[-1] and "pages 5 + tails 0 =" in lines[-1]
