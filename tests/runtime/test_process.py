"""A service's process from outside: arguments, signals, one line for an error, and its end."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pageferry.runtime.process import lasting_objects

SERVICE = """
import asyncio, atexit, sys
from pageferry.core.errors import InvalidArgumentError
from pageferry.runtime.process import ENGINE_OPTIONS, run_service

async def serve(config, stop):
    print("ready", config.server.port, flush=True)
    await stop.wait()
    print("stopping", flush=True)
    return 3

async def tell(config, stop):
    print(config.engine.page_format, config.engine.cache_layers, config.engine.device)
    return 0

async def leave(config, stop):
    atexit.register(print, "taken apart")
    print("flushed")
    return 0

async def ignore(config, stop):
    print("ready", flush=True)
    await asyncio.Event().wait()

async def refuse(config, stop):
    raise InvalidArgumentError("engine.threads is 999, must be at most 2")

async def crash(config, stop):
    raise KeyError("rope_theta")

run_service(globals()[sys.argv[1]], name="test", arguments=sys.argv[2:], engine_options=ENGINE_OPTIONS)
"""


def command(kind: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", SERVICE, kind, *arguments]


def run(kind: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(kind, *arguments), capture_output=True, text=True, timeout=100)


@contextmanager
def started(kind: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A process that has said that it is ready."""
    with subprocess.Popen(
        command(kind, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            assert process.stdout.readline().startswith("ready")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_service_to_stop_and_its_code_is_the_processes(number: signal.Signals) -> None:
    with started("serve") as process:
        process.send_signal(number)
        output, errors = process.communicate(timeout=100)
    assert output == "stopping\n"
    assert process.returncode == 3
    assert '"event": "stopping"' in errors


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    with started("ignore") as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr and '"event": "stopping"' in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert process.returncode == 130


def test_a_worker_has_options_for_its_pages_and_its_device() -> None:
    done = run("tell", "--pages", "k=int8:channel,v=int4", "--cache-layers", "0=window:32;1=full", "--device", "cuda:1")
    assert done.stdout == "k=int8:channel,v=int4 0=window:32;1=full cuda:1\n"
    done = run("tell", "--device", "gpu")
    assert "engine.device is 'gpu', must be cpu, or cuda:N" in done.stderr
    assert done.returncode == 1


def test_the_end_flushes_what_was_printed_and_takes_nothing_apart() -> None:
    done = run("leave")
    assert (done.returncode, done.stdout) == (0, "flushed\n")


def test_lasting_objects_are_never_searched_for_garbage() -> None:
    frozen = gc.get_freeze_count()
    try:
        with lasting_objects():
            assert not gc.isenabled()
            lasting: list[object] = []
            lasting.append(lasting)
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        assert all(item is not lasting for item in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_error_is_one_line() -> None:
    done = run("refuse")
    assert (done.returncode, done.stderr) == (1, "error: engine.threads is 999, must be at most 2\n")


def test_a_crash_is_one_line_and_its_traceback_a_matter_of_level_debug() -> None:
    done = run("crash")
    assert (done.returncode, done.stderr) == (1, "error: KeyError: 'rope_theta'\n")
    done = run("crash", "--set", "telemetry.log_level=debug")
    assert done.returncode == 1
    assert "rope_theta" in done.stderr
    assert '"traceback": "Traceback' in done.stderr


def test_configuration_comes_from_the_file_and_then_from_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text("[server]\nport = 1234\n")
    for arguments, port in (([], "1234"), (["--set", "server.port=4321"], "4321")):
        with subprocess.Popen(
            command("serve", "--config", str(path), *arguments), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout and process.stdout.readline() == f"ready {port}\n"
            process.terminate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "/no/such/file"], "error: configuration file /no/such/file cannot be read"),
        (["--set", "server.port"], "error: --set is 'server.port', must be SECTION.FIELD=VALUE"),
        (["--set", "server.port=many"], "error: "),
        (["--set", "server.colour=red"], "error: "),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str) -> None:
    done = run("serve", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_process_that_is_asked_to_ends_with_its_parent() -> None:
    starter = "import subprocess, sys, os; p = subprocess.Popen(sys.argv[1:]); os.read(0, 1); os._exit(9)"
    arguments = [sys.executable, "-c", starter, *command("serve", "--die-with-parent")]
    reader, writer = os.pipe()
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.DEVNULL) as parent:
        os.close(writer)
        with os.fdopen(reader) as output:
            assert output.readline().startswith("ready")
            assert parent.stdin
            parent.stdin.write(b"x")
            parent.stdin.flush()
            assert output.readline() == "stopping\n"
            assert output.read() == "", "its end of the pipe is closed: it has ended"
    assert parent.returncode == 9


def test_a_process_whose_parent_ended_before_it_began_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert run("serve", f"--die-with-parent={ended.pid}").returncode == -signal.SIGTERM


def test_help_names_the_command_as_it_is_typed() -> None:
    command = [sys.executable, "-m", "pageferry.router", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("usage: python -m pageferry.router [-h]")
