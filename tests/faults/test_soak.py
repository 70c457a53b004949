"""The chaos run itself, for a short time; `make soak` runs it for longer."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [3])
def test_a_short_soak_loses_and_leaves_nothing(seed: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("soak.py")
    command = [sys.executable, str(script), "--seed", str(seed), "--seconds", "35", "--rate", "12", "--replays", "0"]
    result = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=390, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
