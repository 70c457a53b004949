"""What a model is, read from a Hugging Face `config.json` or from GGUF metadata; what is not supported is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.fields import Fields
from pageferry.core.gguf import GgufFile
from pageferry.core.rope import RopeScaling, gguf_rope, hf_rope

HF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CONTROL = 3  # of tokenizer.ggml.token_type
# What llama.cpp takes for the end of a turn or of a text, whichever of them the file names.
_GGUF_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
_MAX_HEAD_DIM = 512
_MAX_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. `name` is what requests call it; all else decides what is computed."""

    name: str
    architecture: str  # llama, mistral, qwen2, qwen3
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # position p sees (p - window, p]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise invalid("num_kv_heads", self.num_kv_heads, f"must divide num_heads, {self.num_heads}")
        if self.head_dim % 2 or not 2 <= self.head_dim <= _MAX_HEAD_DIM:
            raise invalid("head_dim", self.head_dim, f"must be even and from 2 to {_MAX_HEAD_DIM}")
        if self.num_layers > _MAX_LAYERS:
            raise invalid("num_layers", self.num_layers, f"must be at most {_MAX_LAYERS}")
        for token_id in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise invalid("bos or eos token id", token_id, f"must be from 0 to {self.vocab_size - 1}")

    @property
    def most_positions(self) -> int:
        """The longest text that `max_model_tokens` may ask for; `max_positions` is what it is without."""
        return self.rope_scaling.most_positions(self.max_positions) if self.rope_scaling else self.max_positions

    @property
    def rotary_scale(self) -> float:
        """What cos and sin are multiplied by."""
        return self.rope_scaling.attention_factor if self.rope_scaling else 1.0

    def served(self, max_positions: int) -> "ModelConfig":
        """As it is computed for texts of up to that many tokens; 0: as many as the model's own limit.

        Frequencies of dynamic scaling become those of that length: stored keys are never turned anew, so all tokens
        of a text need the same. Raises InvalidArgumentError where the model can't be stretched so far.
        """
        if max_positions > self.most_positions:
            raise invalid("max_model_tokens", max_positions, f"must be at most the model's {self.most_positions}")
        served = replace(self, max_positions=max_positions or self.max_positions)
        if self.rope_scaling is None or self.rope_scaling.type != "dynamic":
            return served
        theta = self.rope_scaling.dynamic_theta(self.rope_theta, self.head_dim, served.max_positions)
        return replace(served, rope_theta=theta, rope_scaling=None)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, name: str
    ) -> "ModelConfig":
        """From a parsed `config.json` and, where there is one, `generation_config.json`."""
        fields = Fields("config.json", config)
        architecture = fields.one_of("model_type", HF_ARCHITECTURES)
        fields.refuse_unless("hidden_act", "silu")
        fields.refuse_unless("quantization_config", None)
        hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        head_dim = fields.whole("head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads)
        max_positions = fields.whole("max_position_embeddings")
        rope_theta, rope_scaling = hf_rope(config, head_dim, max_positions)
        has_bias = fields.flag("attention_bias") if architecture != "qwen2" else True
        return cls(
            name=name,
            architecture=architecture,
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden_size,
            num_layers=fields.whole("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.whole("num_key_value_heads", num_heads),
            head_dim=head_dim,
            intermediate_size=fields.whole("intermediate_size"),
            max_positions=max_positions,
            norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=has_bias and architecture != "mistral",
            o_bias=has_bias and architecture in ("llama", "qwen3"),
            mlp_bias=architecture == "llama" and fields.flag("mlp_bias"),
            qk_norm=architecture == "qwen3",
            sliding_window=_hf_window(fields, architecture),
            bos_id=fields.whole_or_none("bos_token_id"),
            eos_ids=_eos_ids(
                {
                    "generation_config.json: eos_token_id": (generation_config or {}).get("eos_token_id"),
                    "config.json: eos_token_id": config.get("eos_token_id"),
                }
            ),
        )

    @classmethod
    def from_gguf(cls, file: GgufFile, name: str) -> "ModelConfig":
        """From a GGUF file's metadata, and from which tensors it has."""
        general = Fields("model file", file.metadata)
        architecture = general.one_of("general.architecture", GGUF_ARCHITECTURES)
        fields = general.below(f"{architecture}.", "model file")
        if file.metadata.get("split.count", 1) not in (0, 1):
            limit = "only whole files are read: join the parts with llama-gguf-split --merge"
            raise invalid("model file: split.count", file.metadata["split.count"], limit)
        fields.refuse_unless("expert_count", 0)
        hidden_size, num_heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
        head_dim = fields.whole("attention.key_length", hidden_size // num_heads)
        fields.refuse_unless("attention.value_length", head_dim)
        fields.refuse_unless("rope.dimension_count", head_dim)
        max_positions = fields.whole("context_length")
        rope_theta, rope_scaling = gguf_rope(fields, file.tensors, max_positions)
        if "token_embd.weight" not in file.tensors:
            raise InvalidArgumentError("model file has no tensor token_embd.weight", reason="MODEL_FILE_INVALID")
        return cls(
            name=name,
            architecture=architecture,
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden_size,
            num_layers=fields.whole("block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.whole("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=fields.whole("feed_forward_length"),
            max_positions=max_positions,
            norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            sliding_window=fields.whole_or_none("attention.sliding_window") or None,
            bos_id=general.whole_or_none("tokenizer.ggml.bos_token_id"),
            eos_ids=_gguf_eos_ids(file.metadata),
        )


def _eos_ids(sources: Mapping[str, object]) -> tuple[int, ...]:
    """All ids that end a text, from values that are an id, a list of ids or None; the first source's come first."""
    found: dict[int, None] = {}
    for name, source in sources.items():
        for token_id in source if isinstance(source, list) else [] if source is None else [source]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise invalid(name, source, "must be a token id, or a list of such")
            found[token_id] = None
    return tuple(found)


def _gguf_eos_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Those that the file names, and those of its control tokens that are known to end a turn or a text."""
    names = [f"tokenizer.ggml.{kind}" for kind in ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")]
    named = {name: metadata.get(name) for name in names}
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    known: list[int] = []
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        known = [index for index, (token, kind) in pairs if kind == _CONTROL and token in _GGUF_ENDS]
    return _eos_ids(named | {"known": known})


def _hf_window(fields: Fields, architecture: str) -> int | None:
    if architecture == "llama":
        return None
    if architecture == "mistral":
        return (fields.whole_or_none("sliding_window") or None) if "sliding_window" in fields.values else 4096
    if not fields.flag("use_sliding_window"):
        return None
    first = fields.whole_or_none("max_window_layers")
    num_full = 28 if first is None else first
    kinds = fields.values.get("layer_types")
    if kinds and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise invalid("config.json: layer_types", kinds, "must be a list of texts")
    found = set(kinds or ["full_attention"] * (num_full > 0))
    if not kinds and num_full < fields.whole("num_hidden_layers"):
        found.add("sliding_attention")
    if found == {"full_attention"}:
        return None
    if found == {"sliding_attention"}:
        return fields.whole("sliding_window")
    raise invalid("config.json: layer_types", sorted(found), "all layers must attend alike")
