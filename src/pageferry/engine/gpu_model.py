"""The forward pass in Triton kernels, on a GPU, or on a processor where Triton interprets them."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from pageferry.core.model_config import ModelConfig
from pageferry.engine.batch import Batch
from pageferry.engine.device_times import DeviceTimes
from pageferry.engine.gpu_batch import DeviceBatch, DeviceBatchBuilder, HostBatch, Part, Upload
from pageferry.engine.gpu_graphs import DecodeGraphs
from pageferry.engine.gpu_weights import DeviceWeights
from pageferry.engine.pages import PageTensors
from pageferry.engine.weights import LayerWeights, Projection
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.append_pages import append_pages
from pageferry.kernels.gpu.append_tails import append_tails
from pageferry.kernels.gpu.paged_attention import decode_attention
from pageferry.kernels.gpu.paged_prefill import prefill_attention
from pageferry.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from pageferry.kernels.gpu.rotary import rotary
from pageferry.kernels.gpu.silu_mul import silu_mul
from pageferry.kernels.rotary import rotary_table


class DeviceModel:
    """As `Model`: products are of `dtype`; the residual stream, norms, rotary and softmax are fp32.

    A sequence's one row is attended by the decode kernel in every batch, chunks of more by the prefill kernel. On a
    GPU, the first step of single rows, which is warm-up's, records steps of up to `max_num_seqs` of them as CUDA
    graphs, and these then do all such steps; they are of the pages that it came with.
    """

    likeliest = None

    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        dtype: torch.dtype,
        frequencies: Tensor,
        max_positions: int,
        max_num_seqs: int,
    ) -> None:
        self.device = weights.norm.device
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._limits = max_positions, max_num_seqs
        self._cos, self._sin = (
            table.to(self.device) for table in rotary_table(frequencies, max_positions, config.rotary_scale)
        )
        self._upload = Upload(self.device)
        self._graphs: DecodeGraphs | None = None
        self._logits = self._pinned(1)
        self._times = DeviceTimes.of(self.device)

    @property
    def device_s(self) -> float | None:
        return self._times.last_s if self._times is not None else None

    def first_layers(self, num_layers: int) -> "DeviceModel":
        """The same model cut short, with the same norm and head behind; it has graphs and buffers of its own."""
        part = copy.copy(self)
        part._weights = replace(self._weights, layers=self._weights.layers[:num_layers])
        part._upload = Upload(self.device)
        part._graphs = None
        part._logits = self._pinned(1)
        part._times = DeviceTimes.of(self.device)
        return part

    def forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        """Store the batch's keys and values; logits [S, vocab] fp32 of the sampled rows, valid until the next call.

        The step is over when this returns: its pages may be read.
        """
        if self._times is None:
            return self._forward(batch, pages)
        with torch.cuda.device(self.device):
            with self._times.measured():
                logits = self._forward(batch, pages)
                if len(self._logits) < len(logits):
                    self._logits = self._pinned(len(logits))
                on_host = self._logits[: len(logits)]
                on_host.copy_(logits, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            self._times.take()
        return on_host

    def _forward(self, batch: Batch, pages: PageTensors) -> Tensor:
        host = HostBatch(pages.layout, batch)
        if self.device.type == "cuda" and host.counts.max() == 1:
            if self._graphs is None:
                self._graphs = DecodeGraphs(pages.layout, self._upload, *self._limits)
                self._graphs.capture(self.device, lambda recorded: self._compute(recorded, pages))
            if (logits := self._graphs.run(host)) is not None:
                is_all = len(batch.sampled_rows) == len(logits)
                return logits if is_all else logits.index_select(0, batch.sampled_rows.to(self.device))
        builder = DeviceBatchBuilder(pages.layout, self._config.num_heads, self._dtype, self._upload)
        return self._compute(builder.build(host, pages.layers[0]), pages)

    def _pinned(self, num_rows: int) -> Tensor:
        return torch.empty((num_rows, self._config.vocab_size), pin_memory=self.device.type == "cuda")

    def _compute(self, batch: DeviceBatch, pages: PageTensors) -> Tensor:
        residual = self._weights.embedding(batch.token_ids)
        eps, dtype = self._config.norm_eps, self._dtype
        angles = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        added: Tensor | None = None
        for weights, layer in zip(self._weights.layers, pages.layers, strict=False):
            norm = weights.attention_norm
            if added is None:
                x = rms_norm(residual, norm, eps, dtype)
            else:
                x = add_rms_norm(added, residual, norm, eps, dtype)
            attended = self._attention(weights, layer, batch, angles, x)
            x = add_rms_norm(weights.output(attended), residual, weights.mlp_norm, eps, dtype)
            added = weights.down(silu_mul(weights.gate_up(x)))
        if added is not None:
            residual.add_(added)
        last = residual if batch.sampled_rows is None else residual.index_select(0, batch.sampled_rows)
        return self._weights.head(rms_norm(last, self._weights.norm, eps, dtype)).float()

    def _attention(
        self,
        weights: LayerWeights[Projection],
        layer: LayerPages,
        batch: DeviceBatch,
        angles: tuple[Tensor, Tensor],
        x: Tensor,
    ) -> Tensor:
        """[T, H * D] before the output projection, in the compute dtype."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        eps = self._config.norm_eps
        heads = weights.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, self._config.head_dim)
        turned = heads[:, : num_heads + num_kv_heads]
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat((rms_norm(queries, weights.q_norm, eps), rms_norm(keys, weights.k_norm, eps)), 1)
        turned = rotary(turned, *angles)
        new = turned[:, :num_heads], turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]
        if len(batch.parts) == 1:
            attended = self._attend(layer, batch.parts[0], *new)
        else:
            attended = torch.empty_like(new[0], memory_format=torch.contiguous_format)
            for part in batch.parts:
                assert part.rows is not None
                attended.index_copy_(
                    0, part.rows.long(), self._attend(layer, part, *(rows.index_select(0, part.rows) for rows in new))
                )
        return attended.view(len(x), -1).to(self._dtype)

    def _attend(self, layer: LayerPages, part: Part, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Stores the part's keys and values, and attends; [T, H, D] fp32."""
        group = part.groups[layer.group]
        held, scale = group.sequences, self._config.head_dim**-0.5
        if held.tails is None:
            append_pages(layer, keys, values, group.pages, part.slots)
        elif part.touched is None:
            append_tails(layer, keys, values, held)
        else:
            append_tails(layer, keys, values, held, (part.touched.starts, part.touched.full))
        if part.chunks is None:
            return decode_attention(query, layer, held, scale, dtype=self._dtype)
        attended = prefill_attention(query, layer, held, part.chunks, scale, new=(keys, values), dtype=self._dtype)
        if part.touched is not None:
            append_tails(layer, keys, values, held, (part.touched.starts, part.touched.open))
        return attended
