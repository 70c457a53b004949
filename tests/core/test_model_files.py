"""Where models are found, and what is said when they are not."""

import json
from pathlib import Path

import pytest
from gguf_writer import write_gguf

from pageferry.core.errors import InvalidArgumentError, NotFoundError
from pageferry.core.model_files import (
    ModelFiles,
    load_config_of,
    map_gguf,
    resolve_model,
    safetensors_paths,
    sampling_defaults,
)


def test_the_packaged_model_is_found() -> None:
    files = resolve_model("smollm2")
    config = load_config_of(files)
    assert (files.name, files.kind, config.name, config.num_layers) == ("smollm2", "gguf", "smollm2", 30)
    assert (config.head_dim, config.num_kv_heads, config.vocab_size, config.eos_ids) == (64, 3, 49152, (2, 0))


def test_a_directory_and_a_file(tiny_model: Path, tmp_path: Path) -> None:
    files = resolve_model(str(tiny_model))
    assert (files.name, files.kind, safetensors_paths(files)) == (
        tiny_model.name,
        "hf",
        (tiny_model / "model.safetensors",),
    )
    assert load_config_of(files).architecture == "llama"
    path = tmp_path / "some.gguf"
    path.write_bytes(b"")
    assert (resolve_model(str(path)).name, resolve_model(str(path)).kind) == ("some", "gguf")


def test_nothing_there() -> None:
    with pytest.raises(NotFoundError, match=r"'no/such' is no directory, no file, and no packaged model \(smollm2\)"):
        resolve_model("no/such")


def test_a_name_that_no_file_can_have() -> None:
    for name in ("x" * 5000, "a\x00b", "~nobody-of-that-name/model"):
        with pytest.raises(NotFoundError):
            resolve_model(name)


def test_a_directory_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(InvalidArgumentError, match=r"no weights: missing model\.safetensors \(only safetensors"):
        resolve_model(str(tmp_path))


def test_shards_come_from_the_index_and_stay_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "../../etc/one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match=r"missing two\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "two.safetensors").write_bytes(b"")
    paths = safetensors_paths(resolve_model(str(tmp_path)))
    assert paths == (tmp_path / "one.safetensors", tmp_path / "two.safetensors")


@pytest.mark.parametrize("name", ["x" * 300, "a\x00b", "", "..", "."])
def test_an_index_that_names_what_no_file_is_called(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidArgumentError, match="missing "):
        resolve_model(str(tmp_path))


def test_an_index_that_names_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for names in ({"a": 1, "b": "one.safetensors"}, {"a": ["one.safetensors"]}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(InvalidArgumentError, match=r"index\.json: weight_map must name files"):
            resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", '"text"', "\xff", "[" * 100_000], ids=["cut short", "a list", "a text", "not UTF-8", "deep"]
)
def test_a_broken_config_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        load_config_of(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    "field",
    [{"temperature": 10**400}, {"repetition_penalty": 10**400}, {"top_k": 10**400}, {"top_k": 2.5}, {"top_p": 2}],
)
def test_sampling_defaults_that_no_request_could_ask_for_are_refused(tmp_path: Path, field: dict[str, object]) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(field))
    with pytest.raises(InvalidArgumentError, match=f"{path}: {next(iter(field))} is "):
        sampling_defaults(ModelFiles("m", "hf", tmp_path))


def test_errors_of_a_gguf_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for data, message in ((b"", "can't be read"), (b"GGUF", "cut short"), (write_gguf({}, {}), "general.architecture")):
        path.write_bytes(data)
        with pytest.raises(InvalidArgumentError, match=f"cut.gguf.*{message}"):
            load_config_of(resolve_model(str(path)))
    with pytest.raises(InvalidArgumentError, match=r"gone\.gguf.*can't be read"):
        map_gguf(tmp_path / "gone.gguf")


def test_half_a_character_of_a_file_can_be_told() -> None:
    assert InvalidArgumentError("no file \ud800").message == "no file ?"
