"""The frequencies of the rotary embedding, as transformers computes them."""

import math

import torch
from torch import Tensor

from pageferry.core.model_config import ModelConfig
from pageferry.core.rope import RopeScaling


def inverse_frequencies(config: ModelConfig, factors: Tensor | None = None) -> Tensor:
    """[head_dim / 2] fp32: theta^(-2i / head_dim), scaled; `factors` of a GGUF file divide each.

    Of a configuration as it is `served`. cos and sin are still to be multiplied by its `rotary_scale`.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if factors is not None:
        frequencies = frequencies / factors.float()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    assert scaling.type != "dynamic", "which is plain once the length is known"
    match scaling.type:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case _:
            return _yarn(frequencies, scaling, config.rope_theta)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    length, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, scaled)


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Pairs that turn often within the original length are kept, those that do seldom divided (arXiv:2309.00071)."""
    head_dim = 2 * len(frequencies)

    def pair(rotations: float) -> float:
        """Which pair turns so often."""
        turned = math.log(scaling.original_max_positions / (rotations * 2 * math.pi))
        return head_dim * turned / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
