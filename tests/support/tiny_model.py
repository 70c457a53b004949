"""A small random model in the form of a Hugging Face directory, made in milliseconds and the same every time.

Byte-level tokenizer of 320 ids: four special ones, the 256 bytes, and merges of frequent English pairs. Run as a
script it writes the model to the directory named.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
BOS_ID, EOS_ID = 1, 2
VOCAB_SIZE = 320
_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro"
)
_SPACED = "t a o s w i b c m p f d h l e n r g u"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    """Sizes that a test may change."""

    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 128
    head_dim: int = 16
    max_position_embeddings: int = 4096


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies, as GPT-2 chose them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _tokenizer() -> dict[str, object]:
    characters = byte_characters()
    space = characters[ord(" ")]
    merges = [list(pair) for pair in _PAIRS.split()] + [[space, letter] for letter in _SPACED.split()]
    words = [*SPECIAL_TOKENS, *characters, *("".join(pair) for pair in merges)]
    words += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(words))]
    return tokenizer_json(SPECIAL_TOKENS, words, merges)


def tokenizer_json(special: Sequence[str], words: Sequence[str], merges: list[list[str]]) -> dict[str, object]:
    """A byte-level tokenizer.json; the words begin with the special ones."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": text, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for index, text in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: index for index, word in enumerate(words)},
            "merges": merges,
        },
    }


def _weights(shape: TinyShape, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, kv = (shape.head_dim * heads for heads in (shape.num_attention_heads, shape.num_key_value_heads))

    def matrix(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
        return values

    def norm() -> np.ndarray:
        return (1 + 0.1 * random.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden), "model.norm.weight": norm()}
    for layer in range(shape.num_hidden_layers):
        sizes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        tensors |= {f"{prefix}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
    return tensors


def write_tiny_model(directory: Path, shape: TinyShape | None = None, *, seed: int = 0) -> Path:
    """Write config, weights, tokenizer and chat template; returns the directory."""
    shape = shape or TinyShape()
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[3],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    documents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": tokenizer_config,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1), encoding="utf-8")
    save_file(_weights(shape, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


if __name__ == "__main__":
    print(write_tiny_model(Path(sys.argv[1])))
