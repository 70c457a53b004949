"""The forward pass in one call of the compiled kernels, on weights as a GGUF file has them."""

import copy
from ctypes import c_int32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.model_config import ModelConfig
from pageferry.engine.batch import Batch
from pageferry.engine.pages import PageTensors
from pageferry.engine.quantised_weights import QuantisedLayer, QuantisedWeights
from pageferry.kernels import cpu_library
from pageferry.kernels.cpu_library import CpuKernels, address, byref
from pageferry.kernels.quantised_linear import PackedMatrix
from pageferry.kernels.rotary import rotary_table


class NativeModel:
    """As `Model`, but activations are quantised per group of 32 before each matmul, and nothing is left to torch.

    Once the largest batch has come, no step allocates. A row's logits and pages have the same bits in every batch and
    chunking, and for any number of threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: QuantisedWeights,
        frequencies: Tensor,
        max_positions: int,
        kernels: CpuKernels,
    ) -> None:
        self._kernels = kernels
        self._vocab_size = config.vocab_size
        self._logits = torch.empty((0, config.vocab_size))
        self._likeliest = np.empty(0, np.int32)
        self.likeliest: NDArray[np.int32] | None = None
        self.device_s: float | None = None
        self._pool: tuple[PageTensors, cpu_library.Pool] | None = None  # of the last call's pages
        tables = rotary_table(frequencies, max_positions, config.rotary_scale)
        layers = (cpu_library.Layer * config.num_layers)(*(_layer(layer) for layer in weights.layers))
        self._kept = (weights, tables, layers)  # what the structure points to
        self._model = cpu_library.Model(
            layers=layers,
            norm=address(weights.norm),
            cos=address(tables[0]),
            sin=address(tables[1]),
            embedding=weights.embedding.struct(),
            head=weights.head.struct(),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            eps=config.norm_eps,
        )

    def first_layers(self, num_layers: int) -> "NativeModel":
        """The same model cut short, with the same norm and head behind; it has memory of its own for logits."""
        part = copy.copy(self)
        part._model = cpu_library.Model.from_buffer_copy(self._model)
        part._model.num_layers = num_layers
        part._logits = torch.empty((0, self._vocab_size))
        part._likeliest = np.empty(0, np.int32)
        return part

    def forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        """Store the batch's keys and values; logits [S, vocab] fp32 of the sampled rows, valid until the next call."""
        num_sampled = len(batch.sampled_rows)
        if len(self._logits) < num_sampled:
            self._logits = torch.empty((num_sampled, self._vocab_size))
            self._likeliest = np.empty(num_sampled, np.int32)
        if self._pool is None or self._pool[0] is not pages:
            self._pool = pages, _pool(pages)
        tokens = cpu_library.Tokens(
            ids=address(batch.token_ids, torch.int32),
            sampled_rows=address(batch.sampled_rows, torch.int32),
            logits=address(self._logits),
            likeliest=self._likeliest.ctypes.data,
            num_sampled=num_sampled,
        )
        structs = (byref(self._model), byref(self._pool[1]), byref(batch.sequences.struct))
        self._kernels.call_in_workspace("step", structs, byref(tokens))
        self.likeliest = self._likeliest[:num_sampled]
        return self._logits[:num_sampled]


def _layer(layer: QuantisedLayer) -> cpu_library.Layer:
    return cpu_library.Layer(
        attention_norm=address(layer.attention_norm),
        q_norm=address(layer.q_norm),
        k_norm=address(layer.k_norm),
        mlp_norm=address(layer.mlp_norm),
        qkv=_projection(layer.qkv),
        output=_projection(layer.output),
        gate_up=_projection(layer.gate_up),
        down=_projection(layer.down),
    )


def _pool(pages: PageTensors) -> cpu_library.Pool:
    layers = (cpu_library.Pages * len(pages.layers))(*(layer.struct for layer in pages.layers))
    firsts = [group.layers[0] for group in pages.layout.groups]
    return cpu_library.Pool(layers=layers, first_layers=(c_int32 * len(firsts))(*firsts), num_groups=len(firsts))


def _projection(parts: tuple[PackedMatrix, ...]) -> cpu_library.Projection:
    projection = cpu_library.Projection(num_parts=len(parts), num_rows=sum(part.rows for part in parts))
    for i, part in enumerate(parts):
        projection.parts[i] = part.struct()
    return projection
