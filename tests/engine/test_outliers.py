"""Keys of which a few channels are huge: which formats keep the answers, and that the others are warned of."""

import json
from pathlib import Path

import pytest
import torch
from engines import Generation, load, logits_of, sequence
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.plan import SampleFailure
from pageferry.engine.load import load_engine

PROMPT = [4 + (index * index * 31 + index * 7) % 300 for index in range(512)]


def biased(directory: Path, bias: float) -> Path:
    """The tiny model with a bias on two of the sixteen channels of each key."""
    write_tiny_model(directory)
    weights = load_file(directory / "model.safetensors")
    for layer in range(4):
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            tensor = torch.zeros(rows)
            if name == "k":
                tensor[[3, 5, 19, 21]] = bias
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = tensor
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"attention_bias": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def log_probabilities(model: Path, page_format: str) -> torch.Tensor:
    logits = logits_of(load(model, page_format), sequence(PROMPT, 0, 40), range(64, 513, 64))
    return torch.log_softmax(logits.double(), dim=-1)


# Least top-1 agreement with, and largest mean KL divergence from, fp32 pages over 512 tokens, by the bias in usual
# sizes: what was measured, and a margin.
BOUNDS = {
    0: {
        "fp16": (0.98, 1e-4),
        "fp8_e4m3": (0.9, 3e-3),
        "int8": (0.96, 3e-4),
        "int4:asym": (0.8, 0.015),
        "int4:channel:asym": (0.9, 0.004),
    },
    30: {"fp16": (0.97, 3e-4), "int8": (0.85, 0.01), "int8:asym": (0.88, 0.006), "k=fp16,v=int4:asym": (0.75, 0.02)},
    127: {"fp16": (0.93, 1e-3), "int8:channel:asym": (0.89, 4e-3)},
    600: {"fp16": (0.58, 0.08), "int8:channel:asym": (0.55, 0.1)},
}


@pytest.mark.parametrize("bias", BOUNDS)
def test_formats_are_judged_by_what_they_do_to_answers(bias: int, tmp_path: Path) -> None:
    model = biased(tmp_path / "model", bias)
    exact = log_probabilities(model, "fp32")
    for page_format, (least_agreement, most_divergence) in BOUNDS[bias].items():
        found = log_probabilities(model, page_format)
        agreement = float((exact.argmax(-1) == found.argmax(-1)).double().mean())
        divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
        assert agreement >= least_agreement, page_format
        assert divergence <= most_divergence, page_format


@pytest.mark.parametrize(
    ("bias", "page_format", "warned"),
    [
        (600, "int4", True),
        (600, "int8", True),
        (600, "k=fp8_e4m3,v=bf16", True),
        (600, "k=bf16,v=int4", False),
        (30, "int4:asym", True),
        (30, "fp8_e4m3", True),
        (30, "int8", False),
        (0, "int4", False),
        (600, "int8:channel", True),
        (600, "int8:channel:asym", True),
        (127, "k=int8:channel:asym,v=int4", False),
        (30, "int4:channel", True),
        (30, "fp8_e4m3:channel", True),
    ],
)
def test_what_will_break_is_said_at_start(bias: int, page_format: str, warned: bool, tmp_path: Path) -> None:
    lines: list[str] = []
    config = EngineConfig(model=str(biased(tmp_path, bias)), page_format=page_format, num_pages=8, threads=1)
    load_engine(config, SchedulerConfig(), progress=lines.append)
    found = [line for line in lines if line.startswith("warning: layer")]
    assert len(found) == warned
    assert not warned or "use k=fp32, or k=int8:channel:asym" in found[0]


@pytest.mark.field("vllm-project/vllm#14126", "EricLBuehler/mistral.rs#2051", "vllm-project/vllm#48231")
@pytest.mark.parametrize(
    ("page_format", "overflows"),
    [("fp16", True), ("k=int8,v=int8:channel", True), ("k=fp16,v=bf16", True), ("bf16", False), ("fp32", False)],
)
def test_keys_beyond_fp16_are_told_at_start_and_fail_a_request_by_name(
    page_format: str, overflows: bool, tmp_path: Path
) -> None:
    """Activations of 7e4: nobody gets token 0 for ever."""
    model = biased(tmp_path, 7e4)
    lines: list[str] = []
    config = EngineConfig(model=str(model), page_format=page_format, num_pages=8, threads=1, compute_dtype="fp32")
    engine = load_engine(config, SchedulerConfig(), progress=lines.append)
    assert any("has key biases of 70000, and fp16" in line for line in lines) is overflows
    generation = Generation(engine, [sequence(range(4, 44), 0, 4)])
    generation.prefill()
    (sample,) = generation.results[0]
    assert isinstance(sample, SampleFailure) is overflows
    if isinstance(sample, SampleFailure):
        assert "not finite numbers" in sample.message


@pytest.mark.field("vllm-project/vllm#14126")
def test_nothing_is_computed_in_fp16() -> None:
    with pytest.raises(InvalidArgumentError, match="compute_dtype is 'fp16', must be one of auto, fp32, bf16"):
        EngineConfig(compute_dtype="fp16")
