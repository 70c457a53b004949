"""Weights of a GGUF file of which the kernels multiply some matrices in its groups, and torch the others."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from pageferry.core.gguf import GgufType
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_shapes import EMBEDDING, HEAD, NORM
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.quantised_weights import merged_blocks
from pageferry.engine.weights import Projection, Weights, bias_of, load_layers
from pageferry.kernels.cpu_library import CpuKernels
from pageferry.kernels.linear import Linear
from pageferry.kernels.quantised_linear import PackedMatrix, pack, quantised_linear


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A `Projection` in the file's groups, of x in any dtype."""

    kernels: CpuKernels
    matrix: PackedMatrix

    def __call__(self, x: Tensor) -> Tensor:
        return quantised_linear(self.kernels, x.float().contiguous(), self.matrix).to(x.dtype)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A `Projection` whose results are those of several."""

    parts: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


def load_mixed_weights(
    config: ModelConfig,
    tensors: GgufTensors,
    dtype: torch.dtype,
    kernels: CpuKernels,
    *,
    progress: Callable[[str], None],
) -> Weights:
    """All weights, layer by layer; shapes were checked. The table of tokens has numbers of `dtype`."""
    loader = _Loader(tensors, dtype, kernels)
    layers = load_layers(config, loader.norm, loader.projection, progress)
    head = loader.projection(EMBEDDING if config.tied_embeddings else HEAD)
    return Weights(tensors.load(EMBEDDING, dtype), layers, loader.norm(NORM), head)


@dataclass(frozen=True, slots=True)
class _Loader:
    tensors: GgufTensors
    dtype: torch.dtype
    kernels: CpuKernels

    def norm(self, name: str) -> Tensor:
        return self.tensors.load(name, torch.float32)

    def projection(self, *names: str) -> Projection:
        parts = tuple(self._part(kind, list(run)) for kind, run in groupby(names, key=self.tensors.multiplied_as))
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def _part(self, kind: GgufType | None, names: list[str]) -> Projection:
        if kind is not None:
            (blocks,) = merged_blocks(self.tensors, *names)
            return PackedLinear(self.kernels, pack(*blocks))
        weights = [self.tensors.load(name, self.dtype) for name in names]
        biases = [self.tensors.load(name, self.dtype) for name in map(bias_of, names) if name in self.tensors.shapes]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)
