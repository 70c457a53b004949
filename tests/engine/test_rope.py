"""Rotary tables against transformers', at positions where a scaling that is ignored would show."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pageferry.core.model_config import ModelConfig
from pageferry.engine.rope import inverse_frequencies
from pageferry.kernels.rotary import rotary_table

POSITIONS = [0, 1, 1000, 8192, 20000]
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.field("Blaizzy/mlx-vlm#1710", "huggingface/text-generation-inference#816", "vllm-project/vllm#10293")
def test_tables_equal_transformers(scaling: dict[str, Any] | None) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 32768}
    hf = LlamaConfig(**sizes, rope_theta=500_000.0, **({} if scaling is None else {"rope_scaling": scaling}))
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.tensor([POSITIONS]))
    ours_cos, ours_sin = rotary_table(inverse_frequencies(ModelConfig.from_hf(hf.to_dict(), None, "x")), 20001)
    for ours, theirs in ((ours_cos, cos), (ours_sin, sin)):
        assert (ours[POSITIONS] - theirs[0, :, :32]).abs().max() < 1e-5
