"""Which tensors a model must have, under their Hugging Face names, and of what shape."""

from collections.abc import Mapping

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.model_config import ModelConfig

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_MAX_LISTED = 8


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model must have."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    projections = {
        "self_attn.q_proj": (q_rows, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_rows, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (dim,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidArgumentError listing the tensors that are missing, have another shape, or are not understood."""
    missing = [name for name in expected if name not in found]
    wrong = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    # A layer's tensor that nothing here reads would change the model if it were left out.
    unknown = [
        name
        for name in found
        if name.startswith(("model.layers.", "blk.")) and name not in expected and "rotary_emb" not in name
    ]
    problems = {"lacks tensors": missing, "has tensors of wrong shape": wrong, "has unknown tensors": unknown}
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            listed = ", ".join(names[:_MAX_LISTED]) + more
            raise InvalidArgumentError(f"the model {what}: {listed}", reason="MODEL_TENSORS")
