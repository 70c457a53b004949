"""One of the services as a process of its own, which a test kills, pauses and starts again at the same address."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cluster import POLL_S, environment
from links import hold_port

Role = Literal["router", "prefill", "decode"]
Settings = Mapping[str, str]
_MODULES = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}
READY_S = 240.0
STOP_S = 100.0


class Service:
    """A process of one role. Its port is its own from the first life to the last; `output` is that of all lives."""

    def __init__(
        self,
        role: Role,
        port: int = 0,
        settings: Settings | None = None,
        *,
        name: str = "",
        host: str = "127.0.0.1",
        http_port: int = 0,
    ) -> None:
        """`settings` are keyed "section.field". Port 0 is one that is free; `http_port` is a router's."""
        self.role = role
        self.host = host
        self.name = name or role
        self.settings = dict(settings or {})
        self.command_prefix: tuple[str, ...] = ()  # a command that ends by running the service in its place
        self._holders = [hold_port(port, host), *([hold_port(http_port, host)] if role == "router" else [])]
        self._log = tempfile.NamedTemporaryFile(prefix=f"{self.name}-", suffix=".log")  # noqa: SIM115 - for its life
        self._life = 0  # where its output begins
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False

    @property
    def port(self) -> int:
        return int(self._holders[0].getsockname()[1])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def http(self) -> str:
        """Of a router."""
        return f"http://{self.host}:{self._holders[1].getsockname()[1]}"

    @property
    def pid(self) -> int:
        """Of the present life, or the last one."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """What this life has logged."""
        text = Path(self._log.name).read_bytes()[self._life :].decode(errors="replace")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]

    def start(self) -> None:
        """Begin a life. On the main thread, since it ends with the thread that began it."""
        assert threading.current_thread() is threading.main_thread()
        assert not self.is_alive, f"{self.name} runs already"
        own = {"server.host": self.host, "server.port": str(self.port)}
        if self.role == "router":
            own["server.http_port"] = self.http.rpartition(":")[2]
        self._life = Path(self._log.name).stat().st_size
        self._process = subprocess.Popen(
            [*self.command_prefix, sys.executable, "-m", f"pageferry.{_MODULES[self.role]}", "--die-with-parent"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(self.settings | own),
        )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until this life has said that it is ready, and not since that it isn't."""
        end = time.monotonic() + timeout_s
        while True:
            ended = not self.is_alive
            said = [event["event"] for event in self.events() if event["event"] in ("ready", "not_ready")]
            if said[-1:] == ["ready"]:
                return
            assert not ended, f"{self.name} ended before it was ready:\n{self.output[-4000:]}"
            assert time.monotonic() < end, f"{self.name} is not ready after {timeout_s} s:\n{self.output[-4000:]}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._end(signal.SIGKILL, STOP_S)

    def terminate(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM; the exit status. Kills what does not end in time, which fails the caller."""
        return self._end(signal.SIGTERM, timeout_s)

    def signal(self, number: int) -> None:
        assert self._process is not None, f"{self.name} was not started"
        self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP; all its threads stand still when this returns."""
        self.signal(signal.SIGSTOP)
        self._is_paused = True
        while self.is_alive and any(_state(task) not in "Tt" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(0.001)

    def resume(self) -> None:
        self._is_paused = False
        self.signal(signal.SIGCONT)

    def restart(self, changes: Settings | None = None) -> None:
        """Kill it, if it lives, and begin another life at the same address; `wait_ready` is the caller's."""
        if self.is_alive:
            self.kill()
        self.settings.update(changes or {})
        self.start()

    def wait_ended(self, timeout_s: float = STOP_S) -> int:
        """The exit status of a life that ends by itself."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.wait(timeout_s)

    def fds(self) -> int:
        """Open file descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def rss(self) -> int:
        """Bytes resident."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        """Give up the port and the log."""
        for holder in self._holders:
            holder.close()
        self._log.close()

    def _end(self, number: int, timeout_s: float) -> int:
        self.signal(number)  # which does nothing to one that is gone
        if self._is_paused:
            self.resume()
        try:
            return self.wait_ended(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait_ended()
            raise AssertionError(f"{self.name} still ran {timeout_s} s after SIGTERM:\n{self.output[-4000:]}") from None


def _state(task: Path) -> str:
    """The letter of /proc for what a thread does."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    return "T"  # it is over
