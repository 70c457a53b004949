"""What tensors a model's files hold, told from their tables without reading any."""

from dataclasses import dataclass

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf_names import hf_name
from pageferry.core.model_files import ModelFiles, map_gguf, safetensors_paths
from pageferry.core.safetensors import read_header


@dataclass(frozen=True, slots=True)
class StoredTensor:
    type: str
    shape: tuple[int, ...]
    num_bytes: int
    multiplied_bytes: int | None  # as the kernels multiply it in groups; None where it has to be plain numbers


def stored_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    """By Hugging Face names. Raises InvalidArgumentError, naming the file, for what can't be loaded either."""
    if files.kind == "gguf":
        buffer, file = map_gguf(files.path)
        buffer.close()
        return {
            hf_name(name): StoredTensor(
                tensor.type.name,
                tensor.shape,
                tensor.num_bytes,
                tensor.type_bytes(tensor.type.multiplied_as) if tensor.type.multiplied_as is not None else None,
            )
            for name, tensor in file.tensors.items()
        }
    found: dict[str, StoredTensor] = {}
    for path in safetensors_paths(files):
        for name, tensor in read_header(path).items():
            if name in found:
                raise InvalidArgumentError(f"{path}: tensor {name} is in another file too", reason="MODEL_FILE_INVALID")
            found[name] = StoredTensor(tensor.type, tensor.shape, tensor.num_bytes, None)
    return found
