"""`pageferry bench` against servers in this process; what it measures is tested in tests/loadgen."""

import asyncio
import importlib.util
import os
import signal
from pathlib import Path

import bench_results
import fake_inference
import fake_openai
import pytest
from cluster import PAGEFERRY, environment
from fake_openai import DONE, event, usage

from pageferry.cli.__main__ import main
from pageferry.loadgen.result import BenchResult

DOWN = "127.0.0.1:1"


@pytest.fixture(scope="module")
def short(tiny_model: Path) -> tuple[str, ...]:
    lengths = ("--input-tokens", "5", "--output-tokens", "2")
    return ("--requests", "3", *lengths, "--tokenizer", str(tiny_model))  # the packaged one takes a second to read


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, ("bench", *argv))


async def test_a_router_over_grpc(short, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    async with fake_inference.serving() as (address, service):
        assert await run("--target", address, *short, "--label", "ours", "--pid", str(os.getpid()), *files) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ours: grpc {address}, tiny, seed ") and "requests   3 completed, 0 failed" in out
    assert len(service.frontend.requests) == 1 + 3
    result = BenchResult.read(tmp_path / "a.json")
    assert result.summary.completed == 3 and result.summary.cpu.server_seconds is not None
    assert "<html" in (tmp_path / "a.html").read_text()


async def test_a_server_over_http(short, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = (event("a"), event("b", finish="length"), usage(5, 2), DONE)
    key = ("--api-key", "secret", "--model", "mine", "--extra-body", '{"top_k": 1}')
    async with fake_openai.serving(*script) as (url, server):
        assert await run("--url", url, *short, *key, "--json", str(tmp_path / "a.json"), "--seed", "7") == 0
    assert len(server.bodies) == 1 + 1 + 3 and server.bodies[-1]["top_k"] == 1 and server.bodies[-1]["model"] == "mine"
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    assert f"openai {url}, mine, seed 7" in capsys.readouterr().out
    assert "secret" not in (tmp_path / "a.json").read_text()


async def test_seeds_are_new_unless_given(short) -> None:
    async with fake_openai.serving(event("a", finish="length"), DONE) as (url, server):
        for options in ((), (), ("--seed", "7"), ("--seed", "7")):
            await run("--url", url, *short, "--requests", "1", "--warmup", "0", "--input-tokens", "40", *options)
    prompts = [body["prompt"] for body in server.bodies[1::2]]  # a probe comes before each
    assert len(set(prompts[:3])) == 3 and prompts[2] == prompts[3]


async def test_failures_are_told_and_are_the_exit_status(short, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_openai.serving(event("a")) as (url, _):
        assert await run("--url", url, *short) == 1
    assert "3 × the stream ended without a terminal event" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--target", DOWN), f"no router answers at {DOWN}; start one with `pageferry up`"),
        (("--url", f"http://{DOWN}/v1"), f"no server answers at http://{DOWN}/v1"),
        (("--url", DOWN), f"--url is '{DOWN}', must begin with http:// or https://"),
        (("--url", f"http://{DOWN}", "--extra-body", "[1]"), "--extra-body is '[1]', must be a JSON object"),
        (("--extra-body", "{}"), "--extra-body needs --url"),
        (("--duration", "soon"), "--duration is 'soon', must be a number with ms, s, m or h"),
        (("--slo", "ttft=5"), "--slo is 'ttft=5', needs a unit for ttft"),
        (("--find-goodput",), "--find-goodput needs --slo"),
        (("--input-tokens", "0"), "--input-tokens is '0', must be N"),
        (("--rate", "1", "--concurrency", "1"), "exclude each other"),
        (("--replay", "/nowhere"), "--replay: /nowhere can't be read"),
        (("--pid", "-5"), "--pid is -5, is no process"),
        (("--tokenizer", "/nowhere"), "model '/nowhere' is no directory"),
        (("--json", "/nowhere/a.json"), "/nowhere/a.json can't be written: there is no directory /nowhere"),
        (("--html", "/"), "/ can't be written: it is a directory"),
        (("compare", "/nowhere", "/nowhere"), "/nowhere can't be read"),
    ],
)
def test_an_error_is_one_line_at_once(argv: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and problem in err


@pytest.mark.parametrize("argv", [("--target", "a", "--url", "b"), ("--requests", "x"), ("--rat", "1"), ("compare",)])
def test_wrong_usage_exits_with_2(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *argv])
    assert caught.value.code == 2


@pytest.mark.parametrize("argv", [(), ("compare", "a", "b")])
def test_without_the_extra(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else found(name))
    assert main(["bench", *argv]) == 1
    assert capsys.readouterr().err == "error: pageferry bench needs aiohttp: pip install 'pageferry[bench]'\n"


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    first.write_text(bench_results.result().to_json())
    second.write_text(bench_results.result("second", scale=2.0).to_json())
    other.write_text(bench_results.result("third", concurrency=9).to_json())
    page = tmp_path / "page.html"
    assert main(["bench", "compare", str(first), str(second), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "first" in out and "second" in out and "<html" in page.read_text()
    assert main(["bench", "compare", str(first), str(other)]) == 1
    assert "the loads differ: concurrency is 2 in A and 9 in B" in capsys.readouterr().err
    assert main(["bench", "compare", str(first), str(other), "--across-loads"]) == 0


async def test_ctrl_c_prints_what_was_measured(tiny_model: Path) -> None:
    async with fake_openai.serving(event("a"), event("b", finish="length"), DONE) as (url, server):
        load = ("--duration", "60s", "--input-tokens", "8", "--tokenizer", str(tiny_model))
        command = [*PAGEFERRY, "bench", "--url", url, *load]
        piped = asyncio.subprocess.PIPE
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of a background job ignores it else
        process = await asyncio.create_subprocess_exec(*command, stdout=piped, stderr=piped, env=environment())
        signal.signal(signal.SIGINT, ours)
        try:
            await server.until_asked(20)
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
    assert (process.returncode, err) == (130, b"")
    text = out.decode()
    assert "note: interrupted, with " in text and " 0 failed" in text
    assert int(text.partition("requests   ")[2].split()[0]) >= 15
