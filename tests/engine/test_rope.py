"""Rotary tables against transformers', at positions where a scaling that is ignored would show."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.model_config import ModelConfig
from pageferry.engine.rope import inverse_frequencies
from pageferry.kernels.rotary import rotary_table

POSITIONS = [0, 1, 1000, 8192, 20000]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3, of the model's own length": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": YARN,
    "yarn with other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with bounds inside pairs": YARN | {"truncate": False},
    "yarn with an attention factor": YARN | {"attention_factor": 0.75},
    "yarn with mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn by the ratio of lengths": YARN | {"factor": None},
    "dynamic, up to its length": {"rope_type": "dynamic", "factor": 2.0},
}


def ours(hf: LlamaConfig, max_model_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    config = ModelConfig.from_hf(hf.to_dict(), None, "x").served(max_model_tokens)
    return rotary_table(inverse_frequencies(config), max_model_tokens or POSITIONS[-1] + 1, config.rotary_scale)


def llama(max_positions: int, scaling: dict[str, Any] | None) -> LlamaConfig:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": max_positions}
    return LlamaConfig(**sizes, rope_theta=500_000.0, **({} if scaling is None else {"rope_scaling": dict(scaling)}))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.field("Blaizzy/mlx-vlm#1710", "huggingface/text-generation-inference#816", "vllm-project/vllm#10293")
def test_tables_equal_transformers(scaling: dict[str, Any] | None) -> None:
    hf = llama(32768, scaling)
    theirs = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.tensor([POSITIONS]))
    for own, other in zip(ours(hf), theirs, strict=True):
        assert (own[POSITIONS] - other[0, :, :32]).abs().max() < 1e-5


@pytest.mark.parametrize("length", [4096, 4097, 6000, 8192])
def test_dynamic_tables_equal_those_of_a_text_as_long_as_what_is_served(length: int) -> None:
    hf = llama(4096, {"rope_type": "dynamic", "factor": 2.0})
    theirs = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(length)[None])
    plain = rotary_table(inverse_frequencies(ModelConfig.from_hf(llama(4096, None).to_dict(), None, "x")), length)
    for own, other, unscaled in zip(ours(hf, length), theirs, plain, strict=True):
        assert (own - other[0, :, :32]).abs().max() < 1e-5
        assert torch.equal(own, unscaled) == (length == 4096)


def test_how_far_a_model_is_stretched() -> None:
    def most(scaling: dict[str, Any] | None) -> int:
        return ModelConfig.from_hf(llama(4096, scaling).to_dict(), None, "x").most_positions

    assert most({"rope_type": "dynamic", "factor": 2.0}) == most({"rope_type": "linear", "factor": 2.0}) == 8192
    assert most(YARN) == 32768
    assert most(LLAMA3) == most(None) == 4096
    config = ModelConfig.from_hf(llama(4096, {"rope_type": "dynamic", "factor": 2.0}).to_dict(), None, "x")
    assert config.served(0).max_positions == 4096
    with pytest.raises(InvalidArgumentError, match="max_model_tokens is 8193, must be at most the model's 8192"):
        config.served(8193)
