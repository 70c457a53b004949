"""Triton kernels compiled ahead of time, in a process of their own, which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> Any:
    """What it prints, from JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support")])
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def report(*arguments: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run("bench/kernels_report.py", "--json", *arguments)
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    """Nothing spilled, nothing beyond what a block may have: 255 registers a thread, and sm_80's 163 KB of shared."""
    assert {row["target"] for row in rows} == {"sm_80", "sm_90"}
    assert [row for row in rows if row["spill_bytes"]] == []
    assert all(0 < row["registers"] <= 255 and row["shared_bytes"] <= 163 << 10 for row in rows)


@pytest.mark.slow
def test_page_kernels_compile_without_spilling() -> None:
    rows = report("--quick")
    kinds = [row["kernel"].split()[0] for row in rows[::2]]
    assert kinds == ["append", "decode", "prefill", "append", "append", "decode", "prefill"]
    check(rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_without_spilling() -> None:
    rows = report()
    kinds = {row["kernel"].split()[0] for row in rows}
    assert kinds >= {
        "append",
        "decode",
        "combine",
        "prefill",
        "gather",
        "scatter",
        "add",
        "rms",
        "rotary",
        "silu",
        "linear",
    }
    check(rows)


@pytest.mark.parametrize("arch", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_kernels_compile_for_what_the_engine_calls_them_with_and_only_once(arch: str) -> None:
    """Else a step in the midst of serving would wait for a compiler."""
    found = run("tests/support/compile_steps.py", arch)
    assert found["added"] == []
    assert {"_append_kernel", "_append_tails_kernel", "_decode_kernel", "_combine_kernel", "_prefill_kernel"} <= {
        name for name, count in found["compiled"].items() if count <= 4
    }
