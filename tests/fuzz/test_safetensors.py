"""Safetensors files: the header's JSON, offsets and data, and the index of several files."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import JSON_VALUES, altered, as_json, held_to_contract, mutated, numbers
from hypothesis import given, strategies as st
from safetensors.numpy import save

from pageferry.core.model_files import ModelFiles, safetensors_paths
from pageferry.core.safetensors import read_header
from pageferry.engine.hf_tensors import HfTensors

WRITTEN = save({"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float16), "c": np.zeros((0, 4), np.float32)})
HEADER = json.loads(WRITTEN[8 : 8 + struct.unpack("<Q", WRITTEN[:8])[0]])
DATA = WRITTEN[8 + struct.unpack("<Q", WRITTEN[:8])[0] :]
TYPES = ["F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "F4", "BOOL", "none"]
SUITED = {
    "dtype": TYPES,
    "shape": [[], [0], [1, 1], [2**40, 2**40], [-1]],
    "data_offsets": [[0, 24], [24, 0], [0, 2**63], [8, 12]],
}


def file_of(header: Any, length: int | None = None) -> bytes:
    written = as_json(header)
    return struct.pack("<Q", len(written) if length is None else length) + written + DATA


FILES = (
    st.binary(max_size=100)
    | mutated(st.just(WRITTEN))
    | altered(HEADER, SUITED).map(file_of)
    | JSON_VALUES.map(file_of)
    | st.builds(file_of, st.just(HEADER), numbers(0, 2**64 - 1))
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safetensors")


@given(data=FILES)
def test_a_file(directory: Path, data: bytes) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(data)
    with held_to_contract():
        tensors = HfTensors((path,))
        for name in tensors.shapes:
            tensors.first_bytes(name)
            assert tuple(tensors.load(name).shape) == tensors.shapes[name]
        tensors.close()
    with held_to_contract():
        read_header(path)


INDEX = {"metadata": {"total_size": 1}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
NAMES = {"weight_map": [{"a": name} for name in ("../x", "/etc/passwd", "", ".", "..", "a\x00b", "x" * 300)]}


@given(index=altered(INDEX, NAMES).map(as_json) | JSON_VALUES.map(as_json) | mutated(st.just(as_json(INDEX))))
def test_an_index(directory: Path, index: bytes) -> None:
    (directory / "model.safetensors.index.json").write_bytes(index)
    for name in ("one.safetensors", "two.safetensors"):
        (directory / name).write_bytes(WRITTEN)
    with held_to_contract():
        for path in safetensors_paths(ModelFiles("fuzzed", "hf", directory)):
            assert path.parent == directory and path.is_file()
