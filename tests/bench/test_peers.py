"""What of `bench/peers` is arithmetic, names and command lines; the peers themselves are not started."""

import json
import math
from pathlib import Path

import pytest
from peers import report, results
from peers.environments import REQUIREMENTS, Environments, versions
from peers.loads import loads
from peers.results import Figure
from peers.run import seed_of
from peers.system import Place
from peers.systems import SYSTEMS, llama_cpp, transformers
from peers.weights import Weights


@pytest.fixture
def place(tmp_path: Path) -> Place:
    environments = Environments(tmp_path)
    for name in ("llama-cpp", "vllm"):
        (tmp_path / name / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    return Place(environments, Weights(tmp_path / "weights", environments), 8000, 2, streams=8, max_tokens=300)


def result(tokens_per_s: float, gap_ms: float | None = 10.0, answer: int = 128) -> dict[str, object]:
    spread = {"p50": gap_ms, "p99": gap_ms}
    summary = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"), spread) | {"output_tokens_per_s": tokens_per_s}
    machine = {"cpu": "a processor", "cores": 2, "memory_bytes": 8e9, "platform": "Linux", "python": "3.11"}
    request = {"output_tokens": answer, "error": None}
    started = "2026-01-01T00:00:00+00:00"
    return {"summary": summary, "machine": machine, "started": started, "requests": [request], "notes": []}


def write(out: Path, load: str, system: str, *runs: dict[str, object]) -> None:
    for number, run in enumerate(runs):
        path = results.path_of(out, load, system, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run))


def test_a_figure_is_the_median_of_what_is_known() -> None:
    assert Figure.of([3.0, math.nan, 1.0, 8.0]) == Figure(3.0, 1.0, 8.0, 3)
    assert Figure.of([math.nan]) is None


def test_best_is_lowest_time_and_highest_rate() -> None:
    figures = {"a": Figure(1.0, 1.0, 1.0, 1), "b": Figure(2.0, 2.0, 2.0, 1)}
    assert results.best(figures, "lower") == "a"
    assert results.best(figures, "higher") == "b"
    assert results.best({}, "lower") is None


def test_rates_are_compared_with_the_best_peer(tmp_path: Path) -> None:
    write(tmp_path, "streams-8", "pageferry", result(130.0), result(150.0), result(140.0))
    write(tmp_path, "streams-8", "vllm", result(100.0), result(90.0), result(110.0))
    write(tmp_path, "streams-8", "openvino", result(40.0))
    load = loads()["streams-8"]
    (found,) = report.compare(load, {load.name: report.figures_of(tmp_path, load)})
    assert (found.system, found.other, found.ratio, found.limit) == ("pageferry", "vllm", 1.4, 1.3)
    assert found.kept


def test_gaps_are_compared_with_a_peer_and_with_the_same_streams_alone(tmp_path: Path) -> None:
    write(tmp_path, "interference", "pageferry", result(1.0, gap_ms=30.0))
    write(tmp_path, "interference", "vllm", result(1.0, gap_ms=300.0))
    write(tmp_path, "steady", "pageferry", result(1.0, gap_ms=15.0))
    figures = {name: report.figures_of(tmp_path, loads()[name]) for name in ("interference", "steady")}
    peer, own = report.compare(loads()["interference"], figures)
    assert (peer.ratio, peer.limit, peer.kept) == (0.1, 0.2, True)
    assert (own.ratio, own.limit, own.kept) == (2.0, 1.5, False)


def test_dropped_runs_are_counted_but_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "single", "vllm", result(1.0), result(2.0))
    path = results.path_of(tmp_path, "single", "vllm", 1)
    path.rename(results.dropped(path, 0))
    counted, num_dropped = results.read_load(tmp_path, "single")
    assert [run["summary"]["output_tokens_per_s"] for run in counted["vllm"]] == [1.0]
    assert num_dropped == {"vllm": 1}


def test_a_later_run_adds_to_the_description(tmp_path: Path) -> None:
    results.write_description(tmp_path, {"command": "one", "answers": {"pageferry": " Paris"}})
    results.write_description(tmp_path, {"command": "two", "answers": {"vllm": " Paris."}})
    expected = {"command": "two", "answers": {"pageferry": " Paris", "vllm": " Paris."}}
    assert results.read_description(tmp_path) == expected


def test_the_report_names_ratios_targets_and_answers_of_another_length(tmp_path: Path) -> None:
    write(tmp_path, "single", "pageferry", result(100.0, gap_ms=4.0))
    write(tmp_path, "single", "vllm", result(90.0, gap_ms=8.0, answer=100))
    told = {name: {"versions": {}, "command": f"start {name}"} for name in ("pageferry", "vllm")}
    answers = {"pageferry": " Paris. Yes", "vllm": " Paris. No"}
    description = {"command": "python run.py", "prompt": "Capital?", "answers": answers, "systems": told}
    results.write_description(tmp_path, description)
    text = "\n".join(report.render(tmp_path, loads()))
    assert "| Pageferry, one worker, HTTP | a token p50, ms | vLLM | 0.50 | ≤ 0.8 | yes |" in text
    assert "vLLM: answers of 100 to 100 tokens where 128 were asked for" in text
    assert "the first 8 characters the same as Pageferry" in text
    assert "$ python run.py" in text


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_listens_on_loopback_at_its_port(name: str, place: Place) -> None:
    command = SYSTEMS[name].command(place)
    assert str(place.port) in command
    assert "0.0.0.0" not in command


def test_only_pageferry_sees_pageferrys_path(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    assert {name for name in SYSTEMS if "PYTHONPATH" in SYSTEMS[name].process_environment(place)} == {
        name for name in SYSTEMS if not SYSTEMS[name].environment
    }


def test_llama_cpp_has_a_slot_a_stream_with_room_for_the_longest_request(place: Place) -> None:
    command = llama_cpp.SYSTEMS[0].command(place)
    assert command[command.index("--parallel") + 1] == "8"
    assert command[command.index("--ctx-size") + 1] == str(8 * 512)


def test_transformers_has_blocks_for_all_streams(place: Place) -> None:
    command = transformers.command(place)
    blocks, size = (int(command[command.index(name) + 1]) for name in ("--cb-num-blocks", "--cb-block-size"))
    assert blocks * size >= place.streams * place.max_tokens


def test_every_environment_pins_what_its_systems_name() -> None:
    for system in SYSTEMS.values():
        if system.environment:
            assert all(versions(system.environment, system.packages).values())


def test_requirements_are_pinned() -> None:
    for path in REQUIREMENTS.glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith(("#", "--"))]
        assert lines
        assert all("==" in line for line in lines)


def test_an_environment_is_there_once_its_list_is_installed(tmp_path: Path) -> None:
    environments = Environments(tmp_path)
    assert not environments.has("vllm")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "installed").write_text("of an older list")
    assert not environments.has("vllm")


def test_quick_loads_are_the_same_loads() -> None:
    assert list(loads(quick=True)) == list(loads())


def test_no_two_measurements_of_a_system_have_the_same_prompts() -> None:
    seeds = [seed_of(load, number, attempt) for load in loads() for number in range(3) for attempt in range(3)]
    assert len(set(seeds)) == len(seeds)
