"""`pageferry bench` against `pageferry up`: every way in takes prompts and answers of exactly the lengths asked for."""

from pathlib import Path

import pytest
from cluster import Cluster, pageferry

from pageferry.loadgen.result import BenchResult


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_closed_loop(colocated: Cluster, tiny_model: Path, tmp_path: Path, protocol: str, endpoint: str) -> None:
    where = ("--target", colocated.address) if protocol == "grpc" else ("--url", f"{colocated.http}/v1")
    load = ("--requests", "8", "--concurrency", "4", "--input-tokens", "40..60", "--output-tokens", "8")
    file = tmp_path / "result.json"
    rest = ("--tokenizer", str(tiny_model), "--pid", str(colocated.process.pid), "--json", str(file))
    done = pageferry("bench", *where, "--endpoint", endpoint, *load, *rest)
    assert (done.returncode, done.stderr) == (0, "")
    result = BenchResult.read(file)
    assert result.notes == () and result.summary.completed == 8
    assert {record.output_tokens for record in result.requests} == {8}
    assert all(40 <= record.input_tokens <= 60 for record in result.requests)
    assert result.summary.cpu.server_seconds is not None
