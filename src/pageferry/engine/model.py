"""The forward pass of a Llama-family decoder over paged keys and values."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from pageferry.core.model_config import ModelConfig
from pageferry.engine.batch import Batch
from pageferry.engine.pages import PageTensors
from pageferry.engine.weights import LayerWeights, Projection, Weights
from pageferry.kernels.append_pages import LayerPages, RotaryTables, append_pages, rotate_append
from pageferry.kernels.cpu_library import CpuKernels
from pageferry.kernels.paged_attention import compiled_attention, paged_attention
from pageferry.kernels.rms_norm import add_rms_norm, rms_norm
from pageferry.kernels.rotary import rotary, rotary_table
from pageferry.kernels.silu_mul import silu_mul
from pageferry.kernels.tails import TailTargets, append_to_tails


class Model:
    """Computes in the weights' dtype; the residual stream, norms, rotary and softmax are fp32.

    With compiled kernels they attend, all in fp32, and torch does the rest.

    Each token's keys and values are stored first and attention reads them back, so that what a query reads depends on
    the tokens up to it and the page format alone, not on which step or which worker computed them.
    """

    likeliest = None
    device_s = None

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        frequencies: Tensor,
        max_positions: int,
        kernels: CpuKernels | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._cos, self._sin = rotary_table(frequencies, max_positions, config.rotary_scale)
        self._kernels = kernels

    def first_layers(self, num_layers: int) -> "Model":
        """The same model cut short, with the same norm and head behind."""
        part = copy.copy(self)
        part._weights = replace(self._weights, layers=self._weights.layers[:num_layers])
        return part

    def forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        """Store the batch's keys and values; logits [S, vocab] fp32 of the sampled rows."""
        residual = self._weights.embedding.index_select(0, batch.token_ids).float()
        eps = self._config.norm_eps
        added: Tensor | None = None
        for weights, layer in zip(self._weights.layers, pages.layers, strict=False):
            norm = weights.attention_norm
            x = rms_norm(residual, norm, eps) if added is None else add_rms_norm(added, residual, norm, eps)
            attended = self._attention(weights, layer, batch, x.to(self._dtype))
            x = add_rms_norm(weights.output(attended), residual, weights.mlp_norm, eps)
            added = weights.down(silu_mul(weights.gate_up(x.to(self._dtype))))
        if added is not None:
            residual.add_(added)
        last = rms_norm(residual.index_select(0, batch.sampled_rows), self._weights.norm, eps)
        if len(last) == 0:
            return torch.empty((0, self._config.vocab_size))
        return self._weights.head(last.to(self._dtype)).float()

    def _attention(self, weights: LayerWeights[Projection], layer: LayerPages, batch: Batch, x: Tensor) -> Tensor:
        """[T, H * D] before the output projection, in the compute dtype."""
        config = self._config
        heads = weights.qkv(x).view(len(x), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        if self._kernels is None:
            attended = self._attend_by_torch(weights, layer, batch, heads)
        else:
            heads = heads.float()
            rotary = RotaryTables(self._cos, self._sin, weights.q_norm, weights.k_norm, config.norm_eps)
            rotate_append(self._kernels, heads, rotary, layer, batch.sequences)
            queries = heads[:, : config.num_heads]
            attended = compiled_attention(self._kernels, queries, layer, batch.sequences, config.head_dim**-0.5)
        return attended.reshape(len(x), -1).to(self._dtype)

    def _attend_by_torch(
        self, weights: LayerWeights[Projection], layer: LayerPages, batch: Batch, heads: Tensor
    ) -> Tensor:
        config, places = self._config, batch.places[layer.group]
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        turned = heads[:, : num_heads + num_kv_heads]
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat(
                (rms_norm(queries, weights.q_norm, config.norm_eps), rms_norm(keys, weights.k_norm, config.norm_eps)), 1
            )
        positions = batch.sequences.positions
        turned = rotary(turned, self._cos.index_select(0, positions), self._sin.index_select(0, positions))
        keys, values = turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]
        open_tokens = None
        if isinstance(places.targets, TailTargets):
            open_tokens = append_to_tails(layer, keys, values, places.targets)
        else:
            append_pages(layer, keys, values, *places.targets)
        queries, scale = turned[:, :num_heads], config.head_dim**-0.5
        return paged_attention(queries, layer, places.segments, scale, open_tokens=open_tokens, dtype=self._dtype)
