"""The GGUF reader against files written here, whole, cut short and damaged."""

import struct

import numpy as np
import pytest
from gguf_writer import write_gguf
from hypothesis import given, strategies as st

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf import GgufType, parse_gguf

METADATA = {
    "general.architecture": "llama",
    "flag": True,
    "count": -3,
    "ratio": 0.5,
    "names": ["a", "ü", ""],
    "numbers": [1, 2, 3],
    "nested": [[1, 2], [3]],
}
TENSORS = {
    "token_embd.weight": (GgufType.F32, np.arange(12).reshape(3, 4)),
    "blk.0.attn_q.weight": (GgufType.Q4_1, np.ones((2, 64))),
}
FILE = write_gguf(METADATA, TENSORS)


def test_reads_every_kind_of_value_and_the_tensor_table() -> None:
    file = parse_gguf(memoryview(FILE))
    assert file.metadata == METADATA
    embedding, queries = file.tensors["token_embd.weight"], file.tensors["blk.0.attn_q.weight"]
    assert (embedding.shape, embedding.type, embedding.num_bytes) == ((3, 4), GgufType.F32, 48)
    assert (queries.shape, queries.type, queries.num_bytes) == ((2, 64), GgufType.Q4_1, 80)
    assert FILE[embedding.offset : embedding.offset + 48] == np.arange(12, dtype=np.float32).tobytes()


def test_a_file_cut_short_anywhere_is_refused() -> None:
    end = parse_gguf(memoryview(FILE)).tensors["blk.0.attn_q.weight"]
    for length in range(end.offset + end.num_bytes):
        with pytest.raises(InvalidArgumentError, match=r"cut short|does not begin") as caught:
            parse_gguf(memoryview(FILE[:length]))
        assert str(length) in caught.value.message or length < 4


@given(st.integers(0, len(FILE) - 1), st.integers(0, 255))
def test_a_damaged_byte_is_read_or_refused(position: int, value: int) -> None:
    damaged = bytearray(FILE)
    damaged[position] = value
    try:
        parse_gguf(memoryview(bytes(damaged)))
    except InvalidArgumentError as error:
        assert error.reason == "MODEL_FILE_INVALID"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "does not begin with 'GGUF'"),
        (write_gguf({}, {}, version=1), "GGUF version 1"),
        (write_gguf({"general.alignment": 24}, {}), "general.alignment 24"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 2**62), "cut short"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63), "cut short"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 5, 2**60), "cut short: k takes"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 13), "unknown type 13"),
    ],
)
def test_refusals_say_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_gguf(memoryview(data))


def test_an_unsupported_tensor_type_is_named_with_the_supported_ones() -> None:
    data = write_gguf({}, {"x": (GgufType.BF16, np.ones((1, 32)))})
    at = data.rindex(struct.pack("<IQ", GgufType.BF16.value, 0))
    with pytest.raises(InvalidArgumentError, match=r"tensor x as type 16, supported are F32 \(0\).*BF16 \(30\)"):
        parse_gguf(memoryview(data[:at] + struct.pack("<I", 16) + data[at + 4 :]))


def test_rows_must_be_whole_blocks() -> None:
    data = write_gguf({}, {"x": (GgufType.Q8_0, np.ones((2, 32)))})
    at = data.rindex(struct.pack("<QQ", 32, 2))
    with pytest.raises(InvalidArgumentError, match=r"shape \(4, 16\); rows of Q8_0 are multiples of 32"):
        parse_gguf(memoryview(data[:at] + struct.pack("<QQ", 16, 4) + data[at + 16 :]))
