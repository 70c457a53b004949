"""From start to ready to drained, with scripts for processes and a router in this one."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fake_inference
import pytest
from fake_inference import FakeInference

from pageferry.cli import up
from pageferry.cli.launch import plan
from pageferry.cli.supervisor import ChildSpec
from pageferry.core.config import Config, ServerConfig
from pageferry.core.errors import FailedPreconditionError, UnavailableError
from pageferry.v1 import inference_pb2 as pb

SERVICE = "import signal; signal.pause()"
BROKEN = 'print("error: engine.kv_memory_mb is 1, must be at least 9"); raise SystemExit(1)'


@dataclass
class FakeLaunch:
    """Scripts by role, as `Launch` has configurations."""

    address: str
    scripts: dict[str, str] = field(default_factory=lambda: {"router": SERVICE, "decode-0": SERVICE})
    router: Config = field(default_factory=lambda: Config(server=ServerConfig(drain_grace_s=5)))

    client_files: dict[str, str] = field(default_factory=dict)
    page_url: str = "http://127.0.0.1:8080/"

    @property
    def workers(self) -> dict[str, str]:
        return {role: script for role, script in self.scripts.items() if role != "router"}

    def specs(self, directory: Path, environment: object) -> list[ChildSpec]:
        assert directory.is_dir()
        return [
            ChildSpec(role, (sys.executable, "-S", "-c", script), dict(os.environ))
            for role, script in self.scripts.items()
        ]


def worker(state: str, reason: str = "") -> pb.WorkerStatus:
    return pb.WorkerStatus(role="decode", address="127.0.0.1:7000", state=state, reason=reason)


@asynccontextmanager
async def router(*workers: pb.WorkerStatus) -> AsyncIterator[tuple[str, FakeInference]]:
    async with fake_inference.serving() as (address, service):
        service.workers = list(workers)
        yield address, service


async def test_ready_once_every_worker_is() -> None:
    async with router() as (address, service):
        launch = FakeLaunch(address)
        ready = asyncio.Event()

        async def run() -> None:
            async with up.started(launch, lambda *_: None, {}):
                ready.set()

        running = asyncio.create_task(run())
        for workers in ([], [worker("warming", "loading")], [worker("stale")]):
            service.workers = workers
            await service.asked_again()
            assert not ready.is_set()
        service.workers = [worker("ready")]
        await asyncio.wait_for(running, 60)
        assert ready.is_set()


async def test_a_worker_that_does_not_fit_ends_the_start() -> None:
    async with router(worker("refused", "page layouts differ")) as (address, _):
        with pytest.raises(FailedPreconditionError, match=r"127\.0\.0\.1:7000 is refused: page layouts differ"):
            async with up.started(FakeLaunch(address), lambda *_: None, {}):
                pytest.fail("it was taken for ready")


async def test_a_process_that_cannot_start_ends_the_start() -> None:
    async with router() as (address, _):
        launch = FakeLaunch(address, {"router": SERVICE, "decode-0": BROKEN})
        with pytest.raises(
            UnavailableError, match=r"decode-0 can't start: engine\.kv_memory_mb is 1, must be at least 9"
        ):
            async with up.started(launch, lambda *_: None, {}):
                pytest.fail("it was taken for ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_well(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    async with router(worker("ready")) as (address, _):
        launch = FakeLaunch(address)
        printed: list[str] = []

        def ready_line(_: object) -> str:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
            printed.append("ready")
            return "ready"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(up, "_ready_line", ready_line)
            assert await asyncio.wait_for(asyncio.create_task(up._up(launch)), 60) == 0
    out, err = capsys.readouterr()
    assert (printed, out) == (["ready"], "ready\npage: http://127.0.0.1:8080/\n")
    assert err == "stopping; answers have 5 s to end, Ctrl-C ends them now\n"


@pytest.mark.parametrize(
    ("line", "all_shown", "progress_shown"),
    [
        ('{"event": "loading", "level": "info", "progress": "warming up"}', "warming up", "warming up"),
        ('{"event": "listening", "level": "info"}', '{"event": "listening", "level": "info"}', None),
        (
            '{"event": "e", "level": "warning"}',
            '{"event": "e", "level": "warning"}',
            '{"event": "e", "level": "warning"}',
        ),
        ("error: no room", "error: no room", "error: no room"),
        ("[1, 2]", "[1, 2]", "[1, 2]"),
    ],
)
def test_what_is_shown(
    line: str, all_shown: str, progress_shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    up.report_all("decode-0", line)
    assert capsys.readouterr().err == f"decode-0   {all_shown}\n"
    up.report_progress("decode-0", line)
    assert capsys.readouterr().err == (f"decode-0   {progress_shown}\n" if progress_shown else "")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"time": "now", "level": "info", "service": "router", "event": "starting", "config": {"a": 1}}, "starting"),
        ({"level": "info", "event": "listening", "port": 7000, "http_port": 0}, "listening port=7000 http_port=0"),
        (
            {
                "level": "warning",
                "event": "worker_lost",
                "address": "127.0.0.1:7000",
                "state": "",
                "reason": "it ended",
            },
            'warning: worker lost address=127.0.0.1:7000 reason="it ended"',
        ),
        ({"event": "ready", "unready": {}}, "ready"),
        ({"event": "ready", "unready": {"a": "down"}}, 'ready unready={"a": "down"}'),
    ],
)
def test_a_terminal_gets_words(
    entry: dict[str, object], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    up.report_all("router", json.dumps(entry))
    assert capsys.readouterr().err == f"router     {text}\n"


@pytest.mark.parametrize("flags", [[], ["--trace-steps"]])
def test_steps_are_traced_where_asked_for(flags: list[str], tiny_model: Path) -> None:
    parser = argparse.ArgumentParser()
    up.add_command(parser)
    config = up.base_config(parser.parse_args([*flags, "--model", str(tiny_model)]))
    workers = plan(config, 1, 1, {}).workers
    assert {worker.telemetry.trace_steps for worker in workers.values()} == {bool(flags)}
