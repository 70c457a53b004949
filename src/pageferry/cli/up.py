"""`pageferry up`: a router with its workers on this machine, supervised until a signal ends them."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from pageferry.cli.arguments import default_api_key
from pageferry.cli.launch import Launch, plan
from pageferry.cli.run_directory import run_directory
from pageferry.cli.supervisor import Report, Supervisor
from pageferry.client import Client
from pageferry.core.config import Config, ServerConfig
from pageferry.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from pageferry.core.read_config import load_config
from pageferry.core.settings import parse_overrides
from pageferry.runtime.process import ENGINE_OPTIONS, add_engine_options, given_settings
from pageferry.v1 import inference_pb2 as pb

DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8080
_POLL_S = 0.05
_PROGRESS = "progress"  # the field of a log line that is for people
# Fields that a terminal's lines leave out; the bytes are in the progress too.
_UNREADABLE = ("time", "level", "service", "event", "config", "bytes")
_ENGINE_OPTIONS = ("--pages", "--cache-layers")
# Argument and the setting that it stands for, beside those.
_SETTINGS = {
    "host": "server.host",
    "port": "server.port",
    "http_port": "server.http_port",
    "model": "engine.model",
    "page_size": "engine.page_size",
    "kv_memory_mb": "engine.kv_memory_mb",
    "threads": "engine.threads",
    "chat_template": "router.chat_template",
    "trace_steps": "telemetry.trace_steps",
}


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers; 0: decode workers do it")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers")
    parser.add_argument("--model", metavar="DIR|FILE.gguf|NAME", help="default smollm2, the packaged one")
    parser.add_argument("--chat-template", metavar="FILE", help="whose chat template goes in place of the model's")
    add_engine_options(parser, _ENGINE_OPTIONS)
    parser.add_argument("--page-size", type=int, metavar="TOKENS", help="tokens a page; default 16")
    parser.add_argument(
        "--kv-memory-mb", type=int, metavar="MB", help="memory for pages of each worker; default 512; 0: what is there"
    )
    for role in ("prefill", "decode"):
        text = f"of the {role} workers, one each in turn: cpu (the default) or cuda:N, separated by commas"
        parser.add_argument(f"--{role}-devices", metavar="DEVICES", help=text)
    parser.add_argument("--threads", type=int, metavar="N", help="of each worker; default: the cores, divided")
    parser.add_argument("--host", metavar="ADDRESS", help="that the router listens on; default 127.0.0.1")
    parser.add_argument("--port", type=int, help=f"of gRPC; default {DEFAULT_PORT}; 0: a free one")
    parser.add_argument("--http-port", type=int, metavar="PORT", help=f"of HTTP; default {DEFAULT_HTTP_PORT}; 0: off")
    parser.add_argument(
        "--trace-steps",
        action="store_true",
        default=None,
        help="trace each step of a batch too, linked to its requests",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings by section")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="any other setting; may be repeated"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    devices = {role: getattr(arguments, f"{role}_devices") for role in ("prefill", "decode")}
    launch = plan(base_config(arguments), arguments.prefill, arguments.decode, os.environ, devices)
    return asyncio.run(_up(launch))


def base_config(arguments: argparse.Namespace) -> Config:
    """Defaults, then --config, then PAGEFERRY_SECTION_FIELD, then flags. Raises InvalidArgumentError."""
    overrides = parse_overrides(arguments.set) | given_settings(arguments)
    for name, setting in _SETTINGS.items():
        if (value := getattr(arguments, name)) is not None:
            overrides[setting] = value
    defaults = Config(server=ServerConfig(port=DEFAULT_PORT, http_port=DEFAULT_HTTP_PORT))
    try:
        return load_config(arguments.config, os.environ, overrides, base=defaults)
    except InvalidArgumentError as error:
        message = error.message
        names = {f"--{name.replace('_', '-')}": setting for name, setting in _SETTINGS.items()}
        for name, setting in (names | {name: ENGINE_OPTIONS[name][0] for name in _ENGINE_OPTIONS}).items():
            message = message.replace(f"option {setting}: {setting}", name)
        raise InvalidArgumentError(message, reason=error.reason) from None


@contextlib.asynccontextmanager
async def started(launch: Launch, report: Report, environment: Mapping[str, str]) -> AsyncIterator[Supervisor]:
    """All processes, running and ready; drained at the end. Raises PageferryError where one can't start.

    SIGTERM and the first Ctrl-C cancel the calling task, and so lead to the end; a second Ctrl-C kills.
    """
    with run_directory() as directory:
        specs = launch.specs(directory, environment)
        async with Supervisor(specs, report, grace_s=launch.router.server.drain_grace_s) as supervisor:
            _handle_signals(supervisor)
            await _until_ready(launch, supervisor)
            yield supervisor


async def _up(launch: Launch) -> int:
    try:
        async with started(launch, report_all, os.environ):
            print(_ready_line(launch), flush=True)
            if launch.page_url:
                print(f"page: {launch.page_url}", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                grace_s = launch.router.server.drain_grace_s
                print(f"stopping; answers have {grace_s:g} s to end, Ctrl-C ends them now", file=sys.stderr, flush=True)
    except asyncio.CancelledError:  # a signal
        pass
    return 0


def _handle_signals(supervisor: Supervisor) -> None:
    task = asyncio.current_task()
    assert task is not None

    def handle(number: int) -> None:
        if not supervisor.draining:
            task.cancel()
        elif number == signal.SIGINT:
            supervisor.kill()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


async def _until_ready(launch: Launch, supervisor: Supervisor) -> None:
    ready = asyncio.create_task(_all_ready(launch))
    outcomes: list[asyncio.Future[Any]] = [ready, supervisor.failed]
    try:
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            raise supervisor.failed.result()
        await ready
    finally:
        ready.cancel()
    supervisor.settle()


async def _all_ready(launch: Launch) -> None:
    async with Client(launch.address, api_key=default_api_key(), **launch.client_files) as client:
        while True:
            with contextlib.suppress(UnavailableError):
                try:
                    ready = _is_ready(await client.status(), len(launch.workers))
                except (UnauthenticatedError, PermissionDeniedError):  # then anybody may know no more than this
                    ready = await client.is_serving()
                if ready:
                    return
            await asyncio.sleep(_POLL_S)


def _is_ready(status: pb.GetStatusResponse, num_workers: int) -> bool:
    for worker in status.workers:
        if worker.state == "refused":
            raise FailedPreconditionError(f"{worker.role} worker {worker.address} is refused: {worker.reason}")
    return len(status.workers) == num_workers and all(worker.state == "ready" for worker in status.workers)


def _ready_line(launch: Launch) -> str:
    engine = launch.router.engine
    counts = [sum(role.startswith(kind) for role in launch.workers) for kind in ("prefill", "decode")]
    http = f", {launch.http_url}" if launch.http_url else ""
    workers = f"{counts[0]} prefill, {counts[1]} decode"
    return f"ready: grpc {launch.address}{http}; {engine.model}, {engine.page_format} pages, {workers}"


def report_progress(role: str, line: str) -> None:
    """Print a child's progress and what went wrong with it, and leave its other logs out."""
    entry = _entry(line)
    if entry is None or entry.get("level") in ("warning", "error") or _PROGRESS in entry:
        report_all(role, line)


def report_all(role: str, line: str) -> None:
    """Print a child's line: of one about progress what it says, and on a terminal, words and figures for its JSON."""
    entry = _entry(line)
    if entry is not None and _PROGRESS in entry:
        line = str(entry[_PROGRESS])
    elif entry is not None and sys.stderr.isatty():
        line = readable(entry)
    print(f"{role:<10} {line}", file=sys.stderr, flush=True)


def readable(entry: Mapping[str, object]) -> str:
    """A line of log for people, e.g. `warning: worker lost address=127.0.0.1:7000 reason="it ended"`."""
    level = str(entry.get("level", "info"))
    head = "" if level in ("debug", "info") else f"{level}: "
    cells = [
        f"{name}={value if isinstance(value, str) and ' ' not in value else json.dumps(value, ensure_ascii=False)}"
        for name, value in entry.items()
        if name not in _UNREADABLE and value not in ("", {}, [])
    ]
    return head + " ".join([str(entry["event"]).replace("_", " "), *cells])


def _entry(line: str) -> dict[str, object] | None:
    """A line of log; None for text."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and "event" in entry:
            return entry
    return None
