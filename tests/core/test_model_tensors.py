"""The tables of a model's files, against what the libraries make of them."""

import json
import struct
from pathlib import Path

import pytest
from gguf_writer import write_gguf
from safetensors.numpy import load_file, save_file
from tiny_gguf import METADATA, gguf_tensors

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf import GgufType
from pageferry.core.model_files import ModelFiles, resolve_model
from pageferry.core.model_tensors import stored_tensors
from pageferry.core.safetensors import read_header


def test_tensors_of_both_forms_have_the_same_names_and_shapes(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(write_gguf(METADATA, gguf_tensors(tiny_model, GgufType.Q4_0)))
    shapes = {name: values.shape for name, values in load_file(tiny_model / "model.safetensors").items()}
    for files in (resolve_model(str(tiny_model)), ModelFiles("tiny", "gguf", path)):
        assert {name: tensor.shape for name, tensor in stored_tensors(files).items()} == shapes


def test_a_tensor_in_two_files_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for name in ("one", "two"):
        save_file({"model.norm.weight": weights["model.norm.weight"]}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgumentError, match=r"two\.safetensors: tensor model\.norm\.weight is in another file"):
        stored_tensors(resolve_model(str(tmp_path)))


def header(entry: object, data: bytes = bytes(8)) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is cut short: 0 bytes"),
        (struct.pack("<Q", 2**60), "is cut short: 8 bytes, of which the header takes 1152921504606846976"),
        (struct.pack("<Q", 2) + b"{]", "is no safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "its header is no object"),
        (header({}), "entry of tensor x is no description"),
        (header(GOOD | {"dtype": "F8_E4M3"}), "stores tensor x as F8_E4M3, supported are F32, F16, BF16"),
        (header(GOOD | {"shape": ["2"]}), "the shape of tensor x is"),
        (header(GOOD | {"shape": [3]}), "tensor x takes bytes 0 to 8 of 8"),
        (header(GOOD, bytes(7)), "tensor x takes bytes 0 to 8 of 7"),
    ],
)
def test_a_header_that_is_damaged_is_refused_by_the_files_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=f"x.safetensors: .*{message}"):
        read_header(path)
    path.write_bytes(header(GOOD))
    assert read_header(path)["x"].shape == (2,)
