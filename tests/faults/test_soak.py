"""The soak itself, for a short time; `make soak` runs it for longer."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_short_soak_leaves_nothing() -> None:
    script = Path(__file__).with_name("soak.py")
    command = [sys.executable, str(script), "--seed", "3", "--seconds", "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
