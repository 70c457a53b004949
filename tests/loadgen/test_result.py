import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_results
import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.result import BatchSize, BenchResult


@pytest.mark.parametrize("made", [bench_results.result(error="connection lost"), bench_results.empty()])
def test_a_result_is_read_as_it_was_written(made: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(made.to_json())
    assert BenchResult.read(path) == made


def test_the_file_has_the_documented_names() -> None:
    value = json.loads(bench_results.result().to_json())
    assert value["schema"] == "pageferry.bench/1"
    assert value["summary"]["goodput"]["slo"] == {"ttft_ms": 200.0, "itl_ms": 40.0, "e2e_ms": None}
    assert value["summary"]["batch_size"] == {"counts": {"1": 4, "2": 6, "4": 2}, "mean": 2.0}
    assert value["goodput_search"]["trials"][1] == {"rate": 8.0, "share": 0.5, "kept": False}
    assert value["requests"][0]["gaps_ms"] == [15.0, 15.0, 15.0]


def test_whole_numbers_are_numbers() -> None:
    text = bench_results.result().to_json().replace('"rate": 8.0', '"rate": 8')
    assert BenchResult.from_json(text) == bench_results.result()


def set_at(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


def delete_at(*path: str | int) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_at("schema", to="pageferry.bench/2"),
            'a.json: schema is "pageferry.bench/2", must be "pageferry.bench/1"',
        ),
        (delete_at("schema"), 'a.json: schema is none, must be "pageferry.bench/1"'),
        (delete_at("target"), "a.json: target is missing"),
        (delete_at("summary", "ttft_ms", "p99"), "a.json: summary.ttft_ms.p99 is missing"),
        (set_at("summary", "extra", to=1), "a.json: summary.extra is no field of this format"),
        (set_at("summary", "requests", to=True), "a.json: summary.requests is true, must be a whole number"),
        (set_at("requests", 3, "gaps_ms", 1, to="x"), 'a.json: requests[3].gaps_ms[1] is "x", must be a number'),
        (set_at("requests", to={}), "a.json: requests is {}, must be a list"),
        (set_at("summary", "errors", to=[]), "a.json: summary.errors is [], must be an object"),
        (set_at("summary", "batch_size", "counts", "1", to=0.5), "batch_size.counts.1 is 0.5, must be a whole number"),
        (set_at("machine", to="m" * 99), f'a.json: machine is "{"m" * 39}…, must be an object'),
        (set_at("samples", 0, "t_s", to=None), "a.json: samples[0].t_s is null, must be a number"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_field(change: Callable[[Any], None], message: str) -> None:
    value = json.loads(bench_results.result().to_json())
    change(value)
    with pytest.raises(InvalidArgumentError) as raised:
        BenchResult.from_json(json.dumps(value), "a.json")
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"[]", "schema is none"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b'{"schema": NaN}', "it holds NaN; numbers must be finite"),
        (b"[" * 100_000, "nested too deeply"),
        (None, "can't be read: No such file or directory"),
    ],
)
def test_what_is_no_result_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError) as raised:
        BenchResult.read(path)
    assert message in raised.value.message and raised.value.message.startswith(str(path))


def test_batch_sizes_have_a_mean_over_steps() -> None:
    assert BatchSize.of({3: 1, 1: 3, 2: 0}) == BatchSize({"1": 3, "3": 1}, 1.5)
    assert BatchSize.of({}) is None and BatchSize.of({1: 0}) is None
