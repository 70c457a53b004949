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
from pageferry.core.model_shapes import EMBEDDING, HEAD, NORM, expected_shapes
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.weights import LayerWeights, bias_of, load_layers
from pageferry.kernels.quantised_linear import PackedMatrix, pack

QuantisedLayer = LayerWeights[tuple[PackedMatrix, ...]]  # each the matrices whose results lie side by side


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    embedding: PackedMatrix
    layers: tuple[QuantisedLayer, ...]
    norm: Tensor
    head: PackedMatrix


def is_quantised(tensors: GgufTensors) -> bool:
    """Whether every matrix is in groups that the kernels multiply, or can be put into such without loss."""
    return all(tensors.multiplied_as(name) for name, shape in tensors.shapes.items() if len(shape) == 2)


def multiplied_sizes(config: ModelConfig, tensors: GgufTensors) -> dict[str, int | None]:
    """Of all matrices, bytes in groups, or None for those that become numbers."""
    matrices = [name for name, shape in expected_shapes(config).items() if len(shape) == 2]
    return {name: tensors.multiplied_bytes(name) if tensors.multiplied_as(name) else None for name in matrices}


def quantised_bytes(tensors: GgufTensors) -> int:
    """What the weights take once packed, give or take Q4_0's added minimum."""
    return sum(tensors.multiplied_bytes(name) for name in tensors.shapes)


def load_quantised_weights(
    config: ModelConfig, tensors: GgufTensors, *, progress: Callable[[str], None]
) -> QuantisedWeights:
    """All weights, layer by layer; shapes were checked, and `is_quantised` holds."""

    def norm(name: str) -> Tensor:
        return tensors.load(name).float()

    def projection(*names: str) -> tuple[PackedMatrix, ...]:
        return tuple(pack(*blocks) for blocks in merged_blocks(tensors, *names))

    layers = load_layers(config, norm, projection, progress)
    (embedding,) = projection(EMBEDDING)
    (head,) = (embedding,) if config.tied_embeddings else projection(HEAD)
    return QuantisedWeights(embedding, layers, norm(NORM), head)


def merged_blocks(tensors: GgufTensors, *names: str) -> Iterator[tuple[NDArray[np.uint8], GgufType, Tensor | None]]:
    """One matrix, as blocks, of all neighbours that have the same type; its type and its bias."""
    for kind, run in groupby(names, key=tensors.multiplied_as):
        assert kind is not None
        members = list(run)
        yield np.concatenate([tensors.load_blocks(name) for name in members]), kind, _bias(tensors, members)


def _bias(tensors: GgufTensors, names: list[str]) -> Tensor | None:
    biases = [bias_of(name) for name in names]
    if biases[0] not in tensors.shapes:
        return None
    return torch.cat([tensors.load(name).float() for name in biases])
