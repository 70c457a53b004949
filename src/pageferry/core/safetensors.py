"""The header of a safetensors file, which says what tensors lie where; weights themselves are read by the library.

Format: github.com/huggingface/safetensors: 8 bytes of the header's length, little-endian, the header as JSON, the data.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.errors import InvalidArgumentError

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the types that are supported
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    type: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, HeaderTensor]:
    """By name. Raises InvalidArgumentError, naming the file, for what is cut short, damaged or of another type."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else file_bytes
            if length > min(_MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
                raise _damaged(path, f"is cut short: {file_bytes} bytes, of which the header takes {length}")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"is no safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "is no safetensors file: its header is no object")
    data_bytes = file_bytes - _LENGTH.size - length
    return {name: _tensor(path, name, value, data_bytes) for name, value in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, value: object, data_bytes: int) -> HeaderTensor:
    match value:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise _damaged(path, f"is damaged: the header's entry of tensor {name} is no description")
    if kind not in ELEMENT_BYTES:
        raise _damaged(path, f"stores tensor {name} as {kind}, supported are {', '.join(ELEMENT_BYTES)}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise _damaged(path, f"is damaged: the shape of tensor {name} is {shape}")
    if not 0 <= start <= end <= data_bytes or end - start != math.prod(shape) * ELEMENT_BYTES[kind]:
        raise _damaged(path, f"is cut short or damaged: tensor {name} takes bytes {start} to {end} of {data_bytes}")
    return HeaderTensor(kind, tuple(shape), end - start)


def _damaged(path: Path, text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path}: {text}", reason="MODEL_FILE_INVALID")
