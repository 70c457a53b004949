"""What a model is, read from a Hugging Face `config.json` or from GGUF metadata; what is not supported is refused."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.gguf import GgufFile

HF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MAX_HEAD_DIM = 512
_MAX_LAYERS = 1000
_MAX_WHOLE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`linear` divides positions by `factor`; `llama3` divides the slow frequencies and blends those between."""

    type: str  # linear, llama3
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


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

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, name: str
    ) -> "ModelConfig":
        """From a parsed `config.json` and, where there is one, `generation_config.json`."""
        fields = _Fields("config.json", config)
        architecture = fields.one_of("model_type", HF_ARCHITECTURES)
        fields.refuse_unless("hidden_act", "silu")
        fields.refuse_unless("quantization_config", None)
        rope = _hf_rope(config)
        hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        has_bias = fields.flag("attention_bias") if architecture != "qwen2" else True
        return cls(
            name=name,
            architecture=architecture,
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden_size,
            num_layers=fields.whole("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.whole("num_key_value_heads", num_heads),
            head_dim=fields.whole("head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads),
            intermediate_size=fields.whole("intermediate_size"),
            max_positions=fields.whole("max_position_embeddings"),
            norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=rope.positive("rope_theta", 10_000.0),
            rope_scaling=_rope_scaling(rope),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=has_bias and architecture != "mistral",
            o_bias=has_bias and architecture in ("llama", "qwen3"),
            mlp_bias=architecture == "llama" and fields.flag("mlp_bias"),
            qk_norm=architecture == "qwen3",
            sliding_window=_hf_window(fields, architecture),
            bos_id=fields.whole_or_none("bos_token_id"),
            eos_ids=_eos_ids((generation_config or {}).get("eos_token_id"), config.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(cls, file: GgufFile, name: str) -> "ModelConfig":
        """From a GGUF file's metadata, and from which tensors it has."""
        general = _Fields("model file", file.metadata)
        architecture = general.one_of("general.architecture", GGUF_ARCHITECTURES)
        fields = general.below(f"{architecture}.", "model file")
        fields.refuse_unless("expert_count", 0)
        hidden_size, num_heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
        head_dim = fields.whole("attention.key_length", hidden_size // num_heads)
        fields.refuse_unless("attention.value_length", head_dim)
        fields.refuse_unless("rope.dimension_count", head_dim)
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
            max_positions=fields.whole("context_length"),
            norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.positive("rope.freq_base", 10_000.0),
            rope_scaling=_rope_scaling(fields.below("rope.scaling.", "model file: rope.scaling")),
            tied_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            sliding_window=fields.whole_or_none("attention.sliding_window") or None,
            bos_id=general.whole_or_none("tokenizer.ggml.bos_token_id"),
            eos_ids=_eos_ids(*(file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))),
        )


class _Fields:
    """Typed access to outside values; every refusal names the source, the field, the value and the limit."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def below(self, prefix: str, source: str) -> "_Fields":
        """Those whose keys begin with the prefix, without it."""
        values = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        return _Fields(source, values)

    def one_of(self, key: str, supported: tuple[str, ...]) -> str:
        value = self.values.get(key)
        if value not in supported:
            raise invalid(f"{self.source}: {key}", value, f"supported are {', '.join(supported)}")
        return str(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_WHOLE:
            raise invalid(f"{self.source}: {key}", value, f"must be a whole number from 1 to {_MAX_WHOLE}")
        return value

    def whole_or_none(self, key: str) -> int | None:
        value = self.values.get(key)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_whole and 0 <= value <= _MAX_WHOLE):
            raise invalid(f"{self.source}: {key}", value, f"must be absent or a whole number up to {_MAX_WHOLE}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise invalid(f"{self.source}: {key}", value, "must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value not in (None, True, False):
            raise invalid(f"{self.source}: {key}", value, "must be true or false")
        return bool(value)

    def refuse_unless(self, key: str, supported: object) -> None:
        value = self.values.get(key)
        if value is not None and value != supported:
            raise invalid(f"{self.source}: {key}", value, f"only {supported!r} is supported")


def _eos_ids(*sources: object) -> tuple[int, ...]:
    """All ids that end a text, from values that are an id, a list of ids or None; the first source's come first."""
    found: dict[int, None] = {}
    for source in sources:
        for token_id in source if isinstance(source, list) else [source]:
            if isinstance(token_id, int):
                found[token_id] = None
    return tuple(found)


def _hf_rope(config: Mapping[str, Any]) -> _Fields:
    """The rope fields in one place: transformers 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    section = config.get(key) or {}
    if not isinstance(section, dict):
        raise invalid(f"config.json: {key}", section, "must be an object")
    values = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    rope = _Fields(f"config.json: {key}", values | section)
    rope.refuse_unless("partial_rotary_factor", 1.0)
    return rope


def _rope_scaling(fields: _Fields) -> RopeScaling | None:
    kind = fields.values.get("rope_type", fields.values.get("type"))
    if kind in (None, "default", "none"):
        return None
    if kind == "linear":
        return RopeScaling("linear", fields.positive("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            fields.positive("factor"),
            fields.positive("low_freq_factor"),
            fields.positive("high_freq_factor"),
            fields.whole("original_max_position_embeddings"),
        )
    raise invalid(f"{fields.source}: rope_type", kind, "supported are default, linear, llama3")


def _hf_window(fields: _Fields, architecture: str) -> int | None:
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
