"""`pageferry models`: what it says of a model is what the engine makes of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import load
from gguf_writer import random_blocks, write_gguf
from safetensors.numpy import load_file, save_file
from tiny_gguf import METADATA, gguf_tensors

from pageferry.cli.__main__ import main
from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.gguf import GgufType
from pageferry.engine.load import load_engine


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["models", "inspect", "--json", *arguments]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_the_packaged_model_is_told_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", "smollm2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "llama, 134.5 M parameters, 30 layers of 9 query and 3 KV heads of 64",
        "embedding    Q8_0        1 tensors    30.1 MB",
        "49152 tokens\n           ends with 2 <|im_end|>, 0 <|endoftext|>; a prompt begins with nothing of its own",
        "takes system: yes, tools: no",
        "bf16 23.0 kB",
    ):
        assert words in text
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.startswith("smollm2  /")


def test_memory_is_what_the_engine_takes(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = dict(gguf_tensors(tiny_model, GgufType.Q8_0))
    shape = tensors["blk.0.ffn_up.weight"][1].shape
    (tmp_path / "groups.gguf").write_bytes(write_gguf(METADATA, tensors))
    tensors["blk.0.ffn_up.weight"] = (GgufType.Q5_1, random_blocks(GgufType.Q5_1, shape, 0.1))
    (tmp_path / "mixed.gguf").write_bytes(write_gguf(METADATA, tensors))
    for model in (tiny_model, tmp_path / "groups.gguf", tmp_path / "mixed.gguf"):
        config = EngineConfig(model=str(model), kv_memory_mb=512, threads=1)
        engine = load_engine(config, SchedulerConfig(), progress=lambda _: None)
        report = inspected(capsys, str(model), code=0 if model == tiny_model else 1)  # the files have no tokenizer
        pool = report["memory"]["default_pool"]
        expected = {name: value for name, value in engine.memory_report.items() if name != "available"}
        assert (pool["bytes"], pool["pages"]) == (expected, list(engine.num_pages))
        assert report["weights"]["fp32_bytes"] == load(model, num_pages=300).memory_report["weights"]


def test_what_is_asked_for_is_planned(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = inspected(capsys, str(tiny_model), "--memory-mb", "200")["memory"]
    short = inspected(capsys, str(tiny_model), "--memory-mb", "200", "--max-model-tokens", "100")["memory"]
    assert wide["largest_pool"]["longest_text"] == 4096
    assert short["largest_pool"]["longest_text"] == 100
    assert "available: 200 MB" in wide["default_pool"]["problem"]
    report = inspected(capsys, str(tiny_model), "--memory-mb", "1", code=1)
    assert "memory needed: weights" in report["problems"][0]


def test_memory_that_no_machine_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", "smollm2", "--memory-mb", "-4"]) == 1
    assert capsys.readouterr().err == "error: --memory-mb is -4, must be at least 1\n"


def test_a_directory_is_told(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    change(copied / "config.json", rope_scaling=yarn, vocab_size=320, torch_dtype="float32")
    change(copied / "generation_config.json", temperature=0.5, eos_token_id=[2, 0], max_length=20)
    report = inspected(capsys, str(copied))
    assert (report["kind"], report["model"]["architecture"], report["model"]["most_tokens"]) == ("hf", "llama", 16384)
    assert report["model"]["rope_scaling"]["type"] == "yarn"
    assert report["sampling"] == {"temperature": 0.5}
    assert report["tokenizer"]["ends"] == {"2": "<|im_end|>", "0": "<|endoftext|>"}
    assert report["chat"] == {"template": True, "system": True, "tools": False}
    assert report["weights"]["stored"][0] == {"tensors": "attention", "type": "F32", "count": 16, "bytes": 196608}
    assert main(["models", "inspect", str(copied)]) == 0
    assert "yarn scaling by 4\n           texts of up to 4096 tokens, of 16384 with max" in capsys.readouterr().out


def test_templates_are_tried(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.jinja"
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ tools|tojson }}"
    own.write_text(source, encoding="utf-8")
    report = inspected(capsys, str(copied), "--chat-template", str(own))
    assert report["chat"] == {"template": True, "system": False, "tools": True}
    own.write_text("{% for %}", encoding="utf-8")
    assert "error in line 1" in inspected(capsys, str(copied), "--chat-template", str(own))["chat"]["problem"]


def test_every_problem_is_listed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(copied / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copied / "model.safetensors")
    change(copied / "generation_config.json", top_p=3, eos_token_id=5)
    change(copied / "config.json", eos_token_id=5)
    missing, sampling, tokenizer = inspected(capsys, str(copied), code=1)["problems"]
    assert missing == "the model lacks tensors: model.norm.weight"
    assert "top_p is 3" in sampling
    assert "the tokenizer is not the model's" in tokenizer
    assert main(["models", "inspect", str(copied)]) == 1
    assert f"\nproblems   {missing}\n           " in capsys.readouterr().out


def test_a_model_that_is_not_supported_is_told_in_a_line(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copied / "config.json", model_type="gpt2")
    (problem,) = inspected(capsys, str(copied), code=1)["problems"]
    assert "model_type is 'gpt2', supported are llama" in problem
    assert main(["models", "inspect", str(copied / "none")]) == 1
    assert "error: model" in capsys.readouterr().err
