"""Logits against transformers: small random models of every supported kind, in chunks and token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import load, logits_of, relative_error, sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

LIMIT = 1e-4
NUM_TOKENS = 90
SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama tied, biased, head size of its own": (
        LlamaForCausalLM,
        LlamaConfig,
        {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama with one KV head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama with one KV head, head size of its own": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 1, "head_dim": 32},
    ),
    "llama3 rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    ),
    "linear rope": (LlamaForCausalLM, LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "yarn rope": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral with a window": (MistralForCausalLM, MistralConfig, {"sliding_window": 20, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2 with a window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """The model with weights large enough that attention is far from uniform."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    kind, config, settings = MODELS[name]
    model: PreTrainedModel = kind(config(**(SIZES | settings | changes))).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0 if parameter.dim() > 1 else 1, 0.15)
    return model


def token_ids() -> list[int]:
    return torch.randint(0, 99, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def oracle(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids()])).logits[0]
    return logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.field(
    "vllm-project/vllm#2622",
    "NVIDIA/TensorRT-LLM#5912",
    "deepspeedai/DeepSpeed#8389",
    "Blaizzy/mlx-vlm#1710",
    "huggingface/text-generation-inference#816",
    "vllm-project/vllm#10293",
)
def test_logits_equal_transformers_however_they_are_chunked(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    engine, expected = load(tmp_path), oracle(model)
    named = MODELS[name][2]
    assert engine.layout.head_dim == named.get("head_dim", 16)
    assert engine.layout.num_kv_heads == named.get("num_key_value_heads", 2)
    chunkings = {
        "one chunk": [NUM_TOKENS],
        "odd chunks": [7, 16, 48, 49, NUM_TOKENS],
        "token by token after a chunk": [33, *range(34, NUM_TOKENS + 1)],
    }
    for ends in chunkings.values():
        assert relative_error(logits_of(engine, sequence(token_ids(), 11, 6), ends), expected) < LIMIT


def test_dynamic_rope_beyond_its_length_is_that_of_what_is_served(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = build("llama", rope_scaling=scaling, max_position_embeddings=64)
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, max_model_tokens=NUM_TOKENS)
    result = logits_of(engine, sequence(token_ids(), 11, 6), [33, *range(34, NUM_TOKENS + 1)])
    assert relative_error(result, oracle(model)) < LIMIT
    # Pages of workers whose frequencies differ are not shared.
    prints = {length: load(tmp_path, max_model_tokens=length).layout.fingerprint for length in (0, 60, 64, 65, 90)}
    assert prints[0] == prints[60] == prints[64]
    assert len(set(prints.values())) == 3


# What int8 and bf16 pages, and computing in bf16, may cost these models, whose weights are larger than real ones.
LIMITS = {("int8", "fp32"): 0.05, ("bf16", "fp32"): 0.03, ("fp32", "bf16"): 0.06, ("int8", "bf16"): 0.08}


@pytest.mark.parametrize(("page_format", "compute_dtype"), LIMITS)
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "qwen3"])
def test_lossy_pages_and_compute_stay_close(name: str, page_format: str, compute_dtype: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, page_format, compute_dtype=compute_dtype)
    result = logits_of(engine, sequence(token_ids(), 0, 6), [40, *range(41, NUM_TOKENS + 1)])
    assert 0 < relative_error(result, oracle(model)) < LIMITS[page_format, compute_dtype]


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert relative_error(logits_of(load(tmp_path), sequence(token_ids(), 0, 6), [NUM_TOKENS]), oracle(model)) < LIMIT
