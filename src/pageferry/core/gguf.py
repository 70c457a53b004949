"""The GGUF container: header, key-values and tensor table, read from a buffer and checked against its size.

Format: github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian. Tensor data is left where it is.
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap

from pageferry.core.errors import InvalidArgumentError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4  # of arrays in arrays
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufType(IntEnum):
    """The tensor types that are supported, by their number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30

    @property
    def block(self) -> tuple[int, int]:
        """(values, bytes) of the smallest unit."""
        return _BLOCKS[self]

    @property
    def multiplied_as(self) -> "GgufType | None":
        """The type with kernels whose blocks hold the same numbers; None where a tensor has to be dequantised."""
        return _MULTIPLIED_AS.get(self)


_BLOCKS = {
    GgufType.F32: (1, 4),
    GgufType.F16: (1, 2),
    GgufType.BF16: (1, 2),
    GgufType.Q4_0: (32, 18),
    GgufType.Q4_1: (32, 20),
    GgufType.Q5_0: (32, 22),
    GgufType.Q5_1: (32, 24),
    GgufType.Q8_0: (32, 34),
    GgufType.IQ4_NL: (32, 18),
    GgufType.Q2_K: (256, 84),
    GgufType.Q3_K: (256, 110),
    GgufType.Q4_K: (256, 144),
    GgufType.Q5_K: (256, 176),
    GgufType.Q6_K: (256, 210),
    GgufType.IQ4_XS: (256, 136),
}
_MULTIPLIED_AS = {kind: kind for kind in (GgufType.Q4_0, GgufType.Q4_1, GgufType.Q8_0)} | {
    GgufType.Q5_0: GgufType.Q8_0,
    GgufType.IQ4_NL: GgufType.Q8_0,
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor's bytes lie; `shape` is row-major (rows first), `offset` counts from the buffer's start."""

    name: str
    shape: tuple[int, ...]
    type: GgufType
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.type_bytes(self.type)

    def type_bytes(self, kind: GgufType) -> int:
        """What it would take as another type."""
        values, num_bytes = kind.block
        return math.prod(self.shape) // values * num_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    metadata: dict[str, object]  # numbers, strings, bools, and lists of them
    tensors: dict[str, GgufTensor]


def parse_gguf(buffer: memoryview | mmap) -> GgufFile:
    """Read all but the tensors' data; every tensor's bytes are known to be there when it returns.

    Raises InvalidArgumentError, naming the offset and the size, for what is cut short, damaged or not supported.
    """
    cursor = _Cursor(memoryview(buffer))
    try:
        return _parse(cursor)
    finally:
        cursor.view.release()


def _parse(cursor: "_Cursor") -> GgufFile:
    if cursor.take(4, "the magic number") != _MAGIC:
        raise _damaged("is not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise _damaged(f"has GGUF version {version}, versions {_VERSIONS} in little-endian order are supported")
    num_tensors, num_keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = cursor.string("a key")
        metadata[key] = cursor.value(cursor.number("I", f"the type of {key}"), key)
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _damaged(f"has general.alignment {alignment!r}, it must be a power of two")
    data_offset = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        tensor = GgufTensor(name, shape, kind, data_offset + offset)
        if name in tensors or offset % alignment:
            raise _damaged(
                f"is damaged: tensor {name} comes twice, or its offset {offset} is no multiple of {alignment}"
            )
        if tensor.offset + tensor.num_bytes > len(cursor.view):
            raise _damaged(
                f"is cut short: tensor {name} takes bytes {tensor.offset} to {tensor.offset + tensor.num_bytes}, "
                f"the file has {len(cursor.view)}"
            )
        tensors[name] = tensor
    return GgufFile(metadata, tensors)


def _tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], GgufType, int]:
    name = cursor.string("a tensor's name")
    num_dimensions = cursor.number("I", f"the dimensions of {name}")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise _damaged(f"gives tensor {name} {num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are supported")
    shape = tuple(cursor.number("Q", f"the shape of {name}") for _ in range(num_dimensions))[::-1]
    number, offset = cursor.number("I", f"the type of {name}"), cursor.number("Q", f"the offset of {name}")
    try:
        kind = GgufType(number)
    except ValueError:
        supported = ", ".join(f"{kind.name} ({kind.value})" for kind in GgufType)
        raise _damaged(f"stores tensor {name} as type {number}, supported are {supported}") from None
    if 0 in shape or shape[-1] % kind.block[0]:
        raise _damaged(f"gives tensor {name} shape {shape}; rows of {kind.name} are multiples of {kind.block[0]}")
    return name, shape, kind, offset


class _Cursor:
    """Reads forward through the buffer; each read says what it is for, for the error if the buffer ends."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.offset = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.offset + num_bytes
        if end > len(self.view):
            raise _damaged(
                f"is cut short: {what} takes bytes {self.offset} to {end}, the file has {len(self.view)}",
            )
        data = bytes(self.view[self.offset : end])
        self.offset = end
        return data

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0])

    def string(self, what: str) -> str:
        start = self.offset
        try:
            return self.take(self.number("Q", what), what).decode()
        except UnicodeDecodeError:
            raise _damaged(f"is damaged: {what} at byte {start} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self._array(key, depth + 1)
        if kind not in _SCALARS:
            raise _damaged(f"is damaged: the value of {key} at byte {self.offset} has the unknown type {kind}")
        code = "<" + _SCALARS[kind]
        return struct.unpack(code, self.take(struct.calcsize(code), key))[0]

    def _array(self, key: str, depth: int) -> list[object]:
        kind, count = self.number("I", key), self.number("Q", key)
        if kind in _SCALARS:
            # The count is checked against the buffer before anything of its size is built.
            data = self.take(count * struct.calcsize("<" + _SCALARS[kind]), key)
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", data))
        if kind == _STRING:
            return self._strings(count, key)
        return [self.value(kind, key, depth) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[object]:
        """As `string` each, at a quarter of its cost: vocabularies are most of what there is to read."""
        view, offset, length_at, texts = self.view, self.offset, struct.Struct("<Q").unpack_from, list[object]()
        try:
            while len(texts) < count:
                start = offset + 8
                end = start + length_at(view, offset)[0]
                if end > len(view):
                    break
                texts.append(str(view[start:end], "utf-8"))
                offset = end
        except (struct.error, UnicodeDecodeError):
            pass
        self.offset = offset
        return texts if len(texts) == count else [*texts, self.string(key)]  # which says what is wrong


def _damaged(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"model file {text}", reason="MODEL_FILE_INVALID")
