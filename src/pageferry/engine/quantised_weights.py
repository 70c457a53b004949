"""The weights of a GGUF file as it has them, in groups of 32, repacked for the compiled kernels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.gguf import GgufType
from pageferry.core.model_config import ModelConfig
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.weights import EMBEDDING, HEAD, NORM
from pageferry.kernels.quantised_linear import QUANTISED_TYPES, PackedMatrix, pack


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """Norms are fp32; each projection is the matrices whose results lie side by side."""

    attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    qkv: tuple[PackedMatrix, ...]
    output: tuple[PackedMatrix, ...]
    gate_up: tuple[PackedMatrix, ...]
    down: tuple[PackedMatrix, ...]


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    embedding: PackedMatrix
    layers: tuple[QuantisedLayer, ...]
    norm: Tensor
    head: PackedMatrix


def is_quantised(tensors: GgufTensors) -> bool:
    """Whether every matrix is in groups that the kernels multiply."""
    return all(tensors.type_of(name) in QUANTISED_TYPES for name, shape in tensors.shapes.items() if len(shape) == 2)


def quantised_bytes(tensors: GgufTensors) -> int:
    """What the weights take once packed, give or take Q4_0's added minimum."""
    return sum(tensors.num_bytes(name) for name in tensors.shapes)


def load_quantised_weights(
    config: ModelConfig, tensors: GgufTensors, *, progress: Callable[[str], None]
) -> QuantisedWeights:
    """All weights, layer by layer; shapes were checked, and `is_quantised` holds."""
    layers = []
    for layer in range(config.num_layers):
        if layer and layer % 10 == 0:
            progress(f"loaded {layer} of {config.num_layers} layers")
        layers.append(_load_layer(config, tensors, f"model.layers.{layer}."))
    (embedding,) = _projection(tensors, "", EMBEDDING)
    (head,) = (embedding,) if config.tied_embeddings else _projection(tensors, "", HEAD)
    return QuantisedWeights(embedding, tuple(layers), tensors.load(NORM).float(), head)


def _load_layer(config: ModelConfig, tensors: GgufTensors, prefix: str) -> QuantisedLayer:
    def norm(name: str) -> Tensor:
        return tensors.load(f"{prefix}{name}.weight").float()

    return QuantisedLayer(
        attention_norm=norm("input_layernorm"),
        q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        mlp_norm=norm("post_attention_layernorm"),
        qkv=_projection(tensors, prefix, *(f"self_attn.{name}_proj.weight" for name in "qkv")),
        output=_projection(tensors, prefix, "self_attn.o_proj.weight"),
        gate_up=_projection(tensors, prefix, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=_projection(tensors, prefix, "mlp.down_proj.weight"),
    )


def _projection(tensors: GgufTensors, prefix: str, *names: str) -> tuple[PackedMatrix, ...]:
    return tuple(pack(*blocks) for blocks in merged_blocks(tensors, prefix, *names))


def merged_blocks(
    tensors: GgufTensors, prefix: str, *names: str
) -> Iterator[tuple[NDArray[np.uint8], GgufType, Tensor | None]]:
    """One matrix, as blocks, of all neighbours that have the same type; its type and its bias."""
    for kind, run in groupby((prefix + name for name in names), key=tensors.type_of):
        members = list(run)
        yield np.concatenate([tensors.load_blocks(name) for name in members]), kind, _bias(tensors, members)


def _bias(tensors: GgufTensors, names: list[str]) -> Tensor | None:
    biases = [name.removesuffix("weight") + "bias" for name in names]
    if biases[0] not in tensors.shapes:
        return None
    return torch.cat([tensors.load(name).float() for name in biases])
