"""A model's weights as the forward pass multiplies them, checked against the configuration before any is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pageferry.core.model_config import ModelConfig
from pageferry.core.model_shapes import EMBEDDING, HEAD, NORM, check_shapes, expected_shapes
from pageferry.engine.tensors import TensorFiles
from pageferry.kernels.linear import Linear


class Projection(Protocol):
    """A product with a matrix."""

    def __call__(self, x: Tensor) -> Tensor: ...


P = TypeVar("P", covariant=True)


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[P]):
    """Of one layer, with matrices as `P`: such as a `Projection`."""

    attention_norm: Tensor  # [hidden] fp32, as all norms
    qkv: P  # to [(H + 2 Hk) D]: queries, keys, values
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    output: P
    mlp_norm: Tensor
    gate_up: P  # to [2 * intermediate]: gate, up
    down: P


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden] in the compute dtype
    layers: tuple[LayerWeights[Projection], ...]
    norm: Tensor
    head: Projection


def load_weights(
    config: ModelConfig,
    tensors: TensorFiles,
    dtype: torch.dtype,
    *,
    progress: Callable[[str], None],
    linear: Callable[[Tensor, Tensor | None], Projection] = Linear,
    device: torch.device | None = None,
) -> Weights:
    """Read, merge and repack all weights, layer by layer so that little is held twice.

    `linear` repacks a matrix and its bias, which are on the `device`.
    """
    check_shapes(expected_shapes(config), tensors.shapes)
    loader = _Loader(tensors, dtype, linear, device)
    layers = load_layers(config, loader.norm, loader.projection, progress)
    embedding = tensors.load(EMBEDDING, dtype).to(device)
    head = embedding if config.tied_embeddings else tensors.load(HEAD, dtype).to(device)
    return Weights(embedding, layers, loader.norm(NORM), linear(head, None))


@dataclass(frozen=True, slots=True)
class _Loader:
    tensors: TensorFiles
    dtype: torch.dtype
    repacked: Callable[[Tensor, Tensor | None], Projection]
    device: torch.device | None

    def projection(self, *names: str) -> Projection:
        weights = [self.tensors.load(name, self.dtype) for name in names]
        biases = [self.tensors.load(name, self.dtype) for name in map(bias_of, names) if name in self.tensors.shapes]
        bias = torch.cat(biases).to(self.device) if biases else None
        return self.repacked(torch.cat(weights).to(self.device), bias)

    def norm(self, name: str) -> Tensor:
        return self.tensors.load(name).to(self.device, torch.float32)


def load_layers(
    config: ModelConfig,
    norm: Callable[[str], Tensor],
    projection: Callable[..., P],
    progress: Callable[[str], None],
) -> tuple[LayerWeights[P], ...]:
    """All layers: each tensor by `norm` of its name, or by `projection` of those whose results lie side by side."""
    layers = []
    for layer in range(config.num_layers):
        if layer and layer % 10 == 0:
            progress(f"loaded {layer} of {config.num_layers} layers")
        layers.append(_load_layer(config, f"model.layers.{layer}.", norm, projection))
    return tuple(layers)


def _load_layer(
    config: ModelConfig, prefix: str, norm: Callable[[str], Tensor], projection: Callable[..., P]
) -> LayerWeights[P]:
    def named(*parts: str) -> list[str]:
        return [f"{prefix}{part}.weight" for part in parts]

    return LayerWeights(
        attention_norm=norm(*named("input_layernorm")),
        qkv=projection(*named("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        q_norm=norm(*named("self_attn.q_norm")) if config.qk_norm else None,
        k_norm=norm(*named("self_attn.k_norm")) if config.qk_norm else None,
        output=projection(*named("self_attn.o_proj")),
        mlp_norm=norm(*named("post_attention_layernorm")),
        gate_up=projection(*named("mlp.gate_proj", "mlp.up_proj")),
        down=projection(*named("mlp.down_proj")),
    )


def bias_of(name: str) -> str:
    """The name of a matrix's bias."""
    return name.removesuffix("weight") + "bias"
