"""Random schedules of requests and faults, simulated: whatever happens, nothing is lost, doubled or left behind."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sim import workers
from sim.engine import SimModel, make_model
from sim.schedule import Event, Script, failure_of, make_script, play, shrink

_SUPPORT = Path(__file__).parents[1] / "support"
_SEEDS_EACH = 25


def _check(seeds: range) -> None:
    for seed in seeds:
        script = make_script(seed)
        if failure_of(script):
            shortest = shrink(script)
            pytest.fail(f"{shortest}\n{failure_of(shortest)}")


@pytest.mark.parametrize("first", range(0, 8, 2))
def test_some_schedules(first: int) -> None:
    _check(range(first, first + 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(100, 400, _SEEDS_EACH))
def test_many_schedules(first: int) -> None:
    _check(range(first, first + _SEEDS_EACH))


def _digest(seed: int) -> str:
    return hashlib.sha256("\n".join(play(make_script(seed)).trace).encode()).hexdigest()


def test_a_seed_gives_the_same_events_again() -> None:
    assert _digest(3) == _digest(3) != _digest(4)


@pytest.mark.slow
def test_a_seed_gives_the_same_events_in_each_process() -> None:
    code = "import test_schedules; print(test_schedules._digest(3))"
    paths = os.pathsep.join([str(_SUPPORT), str(Path(__file__).parent), *sys.path])
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        digests.add(run.stdout)
    assert len(digests) == 1


def _asks(number: int) -> Event:
    return Event(0.1 * number, "ask", f"r{number}", {"prompt": [number + 1] * 9, "num_tokens": 4})


def test_a_failure_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that draw one wrong token of one request are found out, and all that has nothing to do with it goes."""

    def make_wrong_model(*args: Any) -> SimModel:
        model = make_model(*args)
        model.runner.script[("r1", 2)] = 7
        return model

    faults = (Event(0.05, "slow", "p1-d1", 0.5), Event(0.15, "kill", "p2", 0.5))
    script = Script(1, (_asks(0), faults[0], _asks(1), faults[1], _asks(2)))
    assert not failure_of(script)
    monkeypatch.setattr(workers, "make_model", make_wrong_model)
    assert shrink(script).events == (_asks(1),)
    assert "wrong tokens" in failure_of(script)
