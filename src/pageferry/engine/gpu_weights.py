"""A model's weights on a device: plain numbers for cuBLAS, or a GGUF file's own groups of 32."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.core.gguf import GgufType
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_shapes import EMBEDDING, HEAD, NORM
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.quantised_weights import merged_blocks
from pageferry.engine.tensors import TensorFiles
from pageferry.engine.weights import LayerWeights, Projection, load_layers, load_weights
from pageferry.kernels.gpu.linear import GroupedWeight, linear


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    embedding: Callable[[Tensor], Tensor]  # token ids [T] to [T, hidden] fp32
    layers: tuple[LayerWeights[Projection], ...]
    norm: Tensor
    head: Projection


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """y = x Wᵀ + b, also of rows of W by their numbers."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, row_ids).float()


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """As `DenseLinear`, of matrices whose results lie side by side."""

    parts: tuple[tuple[GroupedWeight, Tensor | None], ...]

    def __call__(self, x: Tensor) -> Tensor:
        results = [linear(x, weight, bias) for weight, bias in self.parts]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def rows(self, row_ids: Tensor) -> Tensor:
        ((weight, _),) = self.parts
        return weight.rows(row_ids).dequantise()


def load_dense(
    config: ModelConfig,
    tensors: TensorFiles,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
) -> DeviceWeights:
    loaded = load_weights(config, tensors, dtype, progress=progress, linear=DenseLinear, device=device)
    return DeviceWeights(DenseLinear(loaded.embedding).rows, loaded.layers, loaded.norm, loaded.head)


def load_grouped(
    config: ModelConfig, tensors: GgufTensors, device: torch.device, progress: Callable[[str], None]
) -> DeviceWeights:
    """Of a file whose matrices all are in groups; shapes were checked."""
    progress(f"copying {config.num_layers} layers to {device}")
    loader = _GroupedLoader(tensors, device)
    layers = load_layers(config, loader.norm, loader.projection, progress)
    embedding = loader.projection(EMBEDDING)
    head = embedding if config.tied_embeddings else loader.projection(HEAD)
    return DeviceWeights(embedding.rows, layers, loader.norm(NORM), head)


@dataclass(frozen=True, slots=True)
class _GroupedLoader:
    tensors: GgufTensors
    device: torch.device

    def projection(self, *names: str) -> GroupedLinear:
        return GroupedLinear(tuple(self._part(*blocks) for blocks in merged_blocks(self.tensors, *names)))

    def norm(self, name: str) -> Tensor:
        return self.tensors.load(name).to(self.device, torch.float32)

    def _part(self, blocks: object, kind: GgufType, bias: Tensor | None) -> tuple[GroupedWeight, Tensor | None]:
        data = torch.as_tensor(blocks).to(self.device)
        weight = GroupedWeight.from_blocks(data.flatten(), kind, len(data))
        return weight, None if bias is None else bias.to(self.device)
