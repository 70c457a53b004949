"""The supervisor with children that are short scripts: they append what happens to them to a file."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pageferry.cli.supervisor import ChildSpec, LineFilter, Supervisor
from pageferry.core.errors import AbortedError

# Runs until SIGTERM; says when it begins and ends.
SERVICE = """
import os, signal, sys
def note(text):
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} {text} {os.getpid()}\\n")
    print(text, flush=True)
signal.signal(signal.SIGTERM, lambda *_: (note("drained"), sys.exit(0)))
note("began")
while True:
    signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("began", flush=True)
while True:
    signal.pause()
"""


class Heard:
    """What the supervisor reported; tests wait for lines instead of time."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, role: str, line: str) -> None:
        self.lines.append((role, line))
        self._changed.set()

    async def until(self, condition: Callable[[list[tuple[str, str]]], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition(self.lines):
                self._changed.clear()
                await self._changed.wait()


def service(role: str, notes: Path, script: str = SERVICE) -> ChildSpec:
    return ChildSpec(role, (sys.executable, "-S", "-c", script, str(notes), role), dict(os.environ))


def supervisor_of(heard: Heard, *specs: ChildSpec) -> Supervisor:
    return Supervisor(specs, heard, grace_s=60, backoff_s=(0.01, 0.04), abandon_s=0.1)


def all_began(num: int) -> Callable[[list[tuple[str, str]]], bool]:
    return lambda lines: sum(line == "began" for _, line in lines) >= num


async def test_the_router_drains_before_the_workers(tmp_path: Path) -> None:
    notes, heard = tmp_path / "notes", Heard()
    specs = [service(role, notes) for role in ("router", "prefill-0", "decode-0")]
    async with supervisor_of(heard, *specs) as supervisor:
        await heard.until(all_began(3))
        supervisor.settle()
        assert not supervisor.failed.done()
    ended = [line.split()[0] for line in notes.read_text().splitlines() if "drained" in line]
    assert ended[0] == "router" and sorted(ended[1:]) == ["decode-0", "prefill-0"]


async def test_a_dead_child_starts_again_with_the_same_command_after_ever_longer_waits(tmp_path: Path) -> None:
    notes, heard = tmp_path / "notes", Heard()
    async with supervisor_of(heard, service("decode-0", notes)) as supervisor:
        await heard.until(all_began(1))
        supervisor.settle()
        for life in range(1, 5):
            os.kill(int(notes.read_text().split()[-1]), signal.SIGKILL)
            await heard.until(all_began(life + 1))
    waits = [line for _, line in heard.lines if "starts again" in line]
    assert waits == [f"ended with signal SIGKILL; starts again in {wait} s" for wait in (0.01, 0.02, 0.04, 0.04)]


async def test_a_child_that_cannot_start_fails_with_its_reason(tmp_path: Path) -> None:
    script = 'print("loading"); print("error: model tiny has no weights"); raise SystemExit(1)'
    heard = Heard()
    specs = (service("router", tmp_path / "notes"), service("decode-0", tmp_path / "notes", script))
    async with supervisor_of(heard, *specs) as supervisor:
        error = await asyncio.wait_for(supervisor.failed, 60)
    assert error.message == "decode-0 can't start: model tiny has no weights"
    assert ("decode-0", "loading") in heard.lines


async def test_a_crash_is_one_line(tmp_path: Path) -> None:
    script = 'def load():\n    raise ValueError("bad shape")\nload()'
    heard = Heard()
    async with supervisor_of(heard, service("decode-0", tmp_path, script)) as supervisor:
        error = await asyncio.wait_for(supervisor.failed, 60)
    assert error.message == "decode-0 can't start: ValueError: bad shape"
    assert heard.lines == [("decode-0", "error: ValueError: bad shape")]


async def test_a_silent_death_names_its_status(tmp_path: Path) -> None:
    async with supervisor_of(Heard(), service("router", tmp_path, "raise SystemExit(3)")) as supervisor:
        error = await asyncio.wait_for(supervisor.failed, 60)
    assert error.message == "router can't start: it ended with exit status 3"


async def test_who_does_not_drain_in_time_is_killed(tmp_path: Path) -> None:
    heard = Heard()
    async with supervisor_of(heard, service("router", tmp_path, STUBBORN)):  # not settled: hardly any grace
        await heard.until(all_began(1))


async def test_a_kill_ends_the_drain(tmp_path: Path) -> None:
    heard = Heard()
    with pytest.raises(AbortedError, match="killed before"):
        async with supervisor_of(heard, service("router", tmp_path, STUBBORN)) as supervisor:
            await heard.until(all_began(1))
            supervisor.settle()
            draining = asyncio.create_task(supervisor.drain())
            await asyncio.sleep(0)
            supervisor.kill()
            with pytest.raises(AbortedError):
                await draining


async def test_a_child_that_waits_to_start_again_is_not_waited_for(tmp_path: Path) -> None:
    heard = Heard()
    specs = (service("decode-0", tmp_path / "notes", 'print("began", flush=True); input()'),)
    async with Supervisor(specs, heard, grace_s=60, backoff_s=(3600, 3600)) as supervisor:
        supervisor.settle()
        await heard.until(lambda lines: any("starts again" in line for _, line in lines))


def test_what_is_shown_of_a_childs_output() -> None:
    lines = LineFilter()
    output = [
        '{"event": "loading"}',
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in load',
        "",
        "KeyError: 'a'",
        "",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        "    ~~~~^^^^",
        "RuntimeError: no luck",
        "bye",
    ]
    shown = [text for line in output if (text := lines.feed(line + "\n")) is not None]
    assert shown == ['{"event": "loading"}', "error: KeyError: 'a'", "error: RuntimeError: no luck", "bye"]
    assert lines.reason == "RuntimeError: no luck"
