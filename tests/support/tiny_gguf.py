"""The small random model as a GGUF file."""

from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from pageferry.core.gguf import GgufType

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
METADATA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 4,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.context_length": 4096,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.eos_token_id": 2,
}


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows: halves of a head become pairs."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_tensors(directory: Path, kind: GgufType, *, permute: bool = True) -> dict[str, tuple[GgufType, np.ndarray]]:
    """The small random model's tensors as a GGUF file has them; vectors stay fp32."""
    tensors: dict[str, tuple[GgufType, np.ndarray]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stem = NAMES[rest.removesuffix(".weight")]
            if permute and stem in ("attn_q", "attn_k"):
                values = permuted(values, 4 if stem == "attn_q" else 2)
            new = f"blk.{layer}.{stem}.weight"
        else:
            new = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        tensors[new] = (kind if values.ndim > 1 else GgufType.F32, values)
    return tensors
