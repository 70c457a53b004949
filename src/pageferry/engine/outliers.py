"""Keys that a page format is too coarse or too small for, as the model's biases foretell.

A few key channels may have a bias far beyond what the other channels ever hold (Qwen2 has such). One scale for all of
a token's key then leaves the others few steps or none: answers break although the stored numbers look close. Scales per
channel spare the others, but not the large ones, whose own steps weigh as much; zero points take away of these what
does not turn with the position.
"""

from statistics import median

from pageferry.core.formats import Element, PageFormat, TensorFormat
from pageferry.core.model_config import ModelConfig
from pageferry.engine.tensors import TensorFiles

# Largest bias, in sizes of a usual channel, at which one step is as large as that: q is at most 127 or 7, and e4m3's
# largest numbers are 8 to 16 steps.
_LIMITS = {Element.FP8_E4M3: 16, Element.INT8: 127, Element.INT4: 7}
_CENTRED = 4  # times as large a bias is borne by zero points per channel, as measured on a small model
_FP16_MAX = 65504


def key_warning(config: ModelConfig, tensors: TensorFiles, pages: PageFormat) -> str:
    """What to tell people before they use these pages for this model; empty where biases foretell nothing."""
    if not config.attention_bias:
        return ""
    prefixes = [f"model.layers.{layer}." for layer in range(config.num_layers)]
    return _overflow(tensors, prefixes, pages) or _coarseness(tensors, prefixes, pages.k)


def _overflow(tensors: TensorFiles, prefixes: list[str], pages: PageFormat) -> str:
    if pages.k.element is not Element.FP16 and not pages.has_tails:
        return ""
    largest, layer = max((_largest(tensors, prefix), layer) for layer, prefix in enumerate(prefixes))
    if largest <= _FP16_MAX:
        return ""
    return (
        f"warning: layer {layer} has key biases of {largest:.0f}, and fp16, in which {pages} pages keep keys, holds "
        f"{_FP16_MAX} at most: requests will fail; use bf16 or fp32"
    )


def _coarseness(tensors: TensorFiles, prefixes: list[str], keys: TensorFormat) -> str:
    limit = _LIMITS.get(keys.element)
    if limit is None:
        return ""
    if keys.is_per_channel and not keys.symmetric:
        limit *= _CENTRED
    ratio, layer = max((_ratio(tensors, prefix), layer) for layer, prefix in enumerate(prefixes))
    if ratio <= limit:
        return ""
    return (
        f"warning: layer {layer} has key biases {ratio:.0f} times as large as its usual keys, {keys} pages resolve "
        f"1/{limit}: expect wrong answers, or use k=fp32, or k=int8:channel:asym"
    )


def _ratio(tensors: TensorFiles, prefix: str) -> float:
    """The largest key bias beside what the weights make of a normalised input in the median channel."""
    gain = tensors.load(f"{prefix}input_layernorm.weight").float()
    spreads = (tensors.load(f"{prefix}self_attn.k_proj.weight").float() * gain).norm(dim=1)
    return _largest(tensors, prefix) / max(float(median(spreads.tolist())), 1e-9)


def _largest(tensors: TensorFiles, prefix: str) -> float:
    return float(tensors.load(f"{prefix}self_attn.k_proj.bias").float().abs().max())
