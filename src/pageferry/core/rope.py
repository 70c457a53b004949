"""How a model's rotary embedding is scaled, read from a Hugging Face `config.json` or from GGUF metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.fields import Fields

_SUPPORTED = "supported are default, linear, dynamic, yarn, llama3"
_GGUF_SUPPORTED = "supported are none, linear, yarn, and llama3's rope_freqs.weight"
_ORIGINAL = "original_max_position_embeddings"
_MAX_POSITIONS = 2**31 - 1
_MAX_DYNAMIC = 1000
_MIN_BETA, _MAX_BETA = 1e-6, 1e6
_STRETCHING = ("linear", "dynamic", "yarn")  # llama3's configurations name the stretched length themselves


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """What is done to the frequencies, and to cos and sin.

    `linear` divides all by `factor`. `llama3` divides the slow ones and blends those between; `yarn` does so by how
    often they turn within the original length, and multiplies cos and sin by `attention_factor`. `dynamic` changes
    nothing up to the original length, and beyond it the base: see `dynamic_theta`.
    """

    type: str  # linear, dynamic, yarn, llama3
    factor: float
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0
    original_max_positions: int = 0  # all but linear
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True  # whether the blended range begins and ends at whole pairs

    def most_positions(self, max_positions: int) -> int:
        """How long texts may be made, where the model's own limit is `max_positions`."""
        if self.type not in _STRETCHING:
            return max_positions
        stretched = (self.original_max_positions or max_positions) * self.factor
        return max(max_positions, int(min(stretched, _MAX_POSITIONS)))

    def dynamic_theta(self, theta: float, head_dim: int, num_positions: int) -> float:
        """The base for texts of up to `num_positions` tokens, as transformers has it at the last of them."""
        if num_positions <= self.original_max_positions:
            return theta
        stretch = self.factor * num_positions / self.original_max_positions - (self.factor - 1)
        return float(theta * stretch ** (head_dim / (head_dim - 2)))


def hf_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[float, RopeScaling | None]:
    """The base and the scaling. transformers 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    section = config.get(key) or {}
    if not isinstance(section, dict):
        raise invalid(f"config.json: {key}", section, "must be an object")
    values = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")} | section
    if config.get(_ORIGINAL) is not None:
        values[_ORIGINAL] = config[_ORIGINAL]
    fields = Fields(f"config.json: {key}", values)
    fields.refuse_unless("partial_rotary_factor", 1.0)
    theta = fields.positive("rope_theta", 10_000.0)
    kind = fields.values.get("rope_type", fields.values.get("type"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", fields.positive("factor"))
    if kind == "dynamic":
        return theta, _hf_dynamic(fields, head_dim, max_positions)
    original = fields.whole(_ORIGINAL, max_positions)
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        if low >= high:
            raise invalid(f"{fields.source}: high_freq_factor", high, f"must be more than low_freq_factor, {low}")
        return theta, RopeScaling("llama3", fields.positive("factor"), low, high, original)
    if kind == "yarn":
        return theta, _hf_yarn(fields, theta, original, max_positions)
    raise invalid(f"{fields.source}: rope_type", kind, _SUPPORTED)


def _hf_dynamic(fields: Fields, head_dim: int, max_positions: int) -> RopeScaling:
    factor = fields.positive("factor")
    if not 1 <= factor <= _MAX_DYNAMIC:
        raise invalid(f"{fields.source}: factor", factor, f"must be from 1 to {_MAX_DYNAMIC} for dynamic")
    if head_dim <= 2:
        raise invalid("head_dim", head_dim, "must be more than 2 for the rope_type dynamic")
    return RopeScaling("dynamic", factor, original_max_positions=max_positions)


def _hf_yarn(fields: Fields, theta: float, original: int, max_positions: int) -> RopeScaling:
    factor = fields.positive("factor", max_positions / original)
    default = _attention_factor(factor)
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        default = _attention_factor(factor, fields.positive("mscale")) / _attention_factor(
            factor, fields.positive("mscale_all_dim")
        )
    _check_theta(fields, theta)
    fast, slow = _betas(fields, "beta_fast", "beta_slow")
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=fields.positive("attention_factor", default),
        truncate=fields.flag("truncate", default=True),
    )


def gguf_rope(fields: Fields, tensors: Mapping[str, object], max_positions: int) -> tuple[float, RopeScaling | None]:
    """From the fields below the architecture's name; llama.cpp takes a factor without a type as linear."""
    if any(name.startswith("rope_factors_") for name in tensors):
        raise InvalidArgumentError(
            f"model file: the rope scaling longrope (rope_factors_long.weight) is not supported; {_GGUF_SUPPORTED}",
            reason="MODEL_UNSUPPORTED",
        )
    theta = fields.positive("rope.freq_base", 10_000.0)
    scaling = fields.below("rope.scaling.", "model file: rope.scaling")
    kind = scaling.values.get("type", "linear")
    if kind != "yarn":
        scaling.refuse_unless("attn_factor", 1.0)
    if kind == "none" or (kind == "linear" and not _gguf_factor(fields, scaling)):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", scaling.positive("factor", _gguf_factor(fields, scaling)))
    if kind != "yarn":
        raise invalid(f"{scaling.source}.type", kind, _GGUF_SUPPORTED)
    scaling.refuse_unless("yarn_ext_factor", 1.0)
    scaling.refuse_unless("yarn_log_multiplier", 0.0)
    _check_theta(fields, theta)
    factor = scaling.positive("factor")
    fast, slow = _betas(scaling, "yarn_beta_fast", "yarn_beta_slow")
    own = scaling.positive("attn_factor", 1.0) * scaling.positive("yarn_attn_factor", 1.0)
    return theta, RopeScaling(
        "yarn",
        factor,
        original_max_positions=scaling.whole("original_context_length", max_positions),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=own * _attention_factor(factor),
    )


def _gguf_factor(fields: Fields, scaling: Fields) -> float | None:
    """None where there is none, or where it says so: 0 in llama.cpp."""
    value = scaling.values.get("factor", fields.values.get("rope.scale_linear"))
    return None if value in (None, 0, 1) else Fields(scaling.source, {"factor": value}).positive("factor")


def _attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _betas(fields: Fields, fast_key: str, slow_key: str) -> tuple[float, float]:
    """How often pairs turn within the original length that are kept, and that are divided."""
    fast, slow = fields.positive(fast_key, 32.0), fields.positive(slow_key, 1.0)
    if not _MIN_BETA <= slow < fast <= _MAX_BETA:
        raise invalid(f"{fields.source}: {fast_key}", fast, f"must be more than {slow_key}, {slow}, and not extreme")
    return fast, slow


def _check_theta(fields: Fields, theta: float) -> None:
    if theta <= 1:
        raise invalid(f"{fields.source}: rope_theta", theta, "must be more than 1 for yarn")
