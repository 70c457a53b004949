"""The forward pass of a Llama-family decoder over paged keys and values."""

import torch
from torch import Tensor

from pageferry.core.model_config import ModelConfig
from pageferry.engine.batch import Batch
from pageferry.engine.pages import PageTensors
from pageferry.engine.weights import LayerWeights, Weights
from pageferry.kernels.append_pages import LayerPages, append_pages
from pageferry.kernels.paged_attention import paged_attention
from pageferry.kernels.rms_norm import add_rms_norm, rms_norm
from pageferry.kernels.rotary import rotary, rotary_table
from pageferry.kernels.silu_mul import silu_mul


class Model:
    """Computes in the weights' dtype; the residual stream, norms, rotary and softmax are fp32.

    Each token's keys and values are stored first and attention reads them back, so that what a query reads depends on
    the tokens up to it and the page format alone, not on which step or which worker computed them.
    """

    def __init__(self, config: ModelConfig, weights: Weights, frequencies: Tensor, max_positions: int) -> None:
        self._config = config
        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._cos, self._sin = rotary_table(frequencies, max_positions)

    def forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        """Store the batch's keys and values; logits [S, vocab] fp32 of the sampled rows."""
        residual = self._weights.embedding.index_select(0, batch.token_ids).float()
        cos, sin = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        eps = self._config.norm_eps
        added: Tensor | None = None
        for weights, layer in zip(self._weights.layers, pages.layers, strict=True):
            norm = weights.attention_norm
            x = rms_norm(residual, norm, eps) if added is None else add_rms_norm(added, residual, norm, eps)
            attended = self._attention(weights, layer, batch, x.to(self._dtype), (cos, sin))
            x = add_rms_norm(weights.output(attended), residual, weights.mlp_norm, eps)
            added = weights.down(silu_mul(weights.gate_up(x.to(self._dtype))))
        if added is not None:
            residual.add_(added)
        last = rms_norm(residual.index_select(0, batch.sampled_rows), self._weights.norm, eps)
        if len(last) == 0:
            return torch.empty((0, self._config.vocab_size))
        return self._weights.head(last.to(self._dtype)).float()

    def _attention(
        self, weights: LayerWeights, layer: LayerPages, batch: Batch, x: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[T, H * D] before the output projection, in the compute dtype."""
        config = self._config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = weights.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, config.head_dim)
        turned = heads[:, : num_heads + num_kv_heads]
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat(
                (rms_norm(queries, weights.q_norm, config.norm_eps), rms_norm(keys, weights.k_norm, config.norm_eps)), 1
            )
        turned = rotary(turned, *tables)
        keys, values = turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]
        append_pages(layer, keys, values, batch.pages, batch.slots)
        queries = turned[:, :num_heads]
        attended = paged_attention(queries, layer, batch.segments, config.head_dim**-0.5, dtype=self._dtype)
        return attended.reshape(len(x), -1).to(self._dtype)
