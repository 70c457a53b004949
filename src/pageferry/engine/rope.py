"""The frequencies of the rotary embedding, as transformers computes them."""

import math

import torch
from torch import Tensor

from pageferry.core.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, factors: Tensor | None = None) -> Tensor:
    """[head_dim / 2] fp32: theta^(-2i / head_dim), scaled; `factors` of a GGUF file divide each."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if factors is not None:
        frequencies = frequencies / factors.float()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.type == "linear" else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    length, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, scaled)
