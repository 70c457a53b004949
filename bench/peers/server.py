"""One server as a process with its children: started, asked one question, stopped by a signal meanwhile, ended."""

import contextlib
import http
import http.client
import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from peers.system import Place, System

PROMPT = "The capital of France is"
_ANSWER_TOKENS = 24
_POLL_S = 0.2
_STOP_S = 20.0


class ServerFailedError(RuntimeError):
    """It ended, or did not answer in time; the message has the end of its log."""


class Server:
    def __init__(self, system: System, place: Place, log: Path) -> None:
        self.system = system
        self.place = place
        self._log = log
        self._output: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            system.command(place),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=system.process_environment(place),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def bench_options(self) -> tuple[str, ...]:
        """How the client reaches it."""
        model = ("--model", self.system.model(self.place))
        if self.system.grpc_port is not None:
            return ("--target", f"127.0.0.1:{self.system.grpc_port(self.place)}", *model)
        return ("--url", f"http://127.0.0.1:{self.place.port}/v1", *model, *self.system.client_options)

    def first_answer(self) -> str:
        """The text after `PROMPT`, greedily, once it answers. Raises ServerFailedError."""
        end = time.monotonic() + self.system.ready_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise self._failed(f"ended with {self._process.returncode}")
            try:
                return self._ask(end - time.monotonic())
            except urllib.error.HTTPError as error:  # 503 while it loads
                if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
                    raise self._failed(f"answers HTTP {error.code}: {error.read()[:500]!r}") from None
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError):
                pass  # it does not listen yet
            time.sleep(_POLL_S)
        raise self._failed(f"does not answer within {self.system.ready_s:g} s")

    def _ask(self, timeout_s: float) -> str:
        fields = {"prompt": PROMPT, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.place.port}/v1/completions",
            json.dumps(fields | {"model": self.system.model(self.place)}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=max(1.0, timeout_s)) as response:
            return str(json.load(response)["choices"][0]["text"])

    def send(self, number: signal.Signals) -> None:
        """To all its processes."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        """End all its processes: gently at first."""
        processes = self._processes()
        self.send(signal.SIGCONT)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        _, left = psutil.wait_procs(processes, timeout=2)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._output.close()

    def _processes(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _failed(self, problem: str) -> ServerFailedError:
        tail = self._log.read_text(errors="replace")[-2000:]
        return ServerFailedError(f"{self.system.name} {problem}; the end of {self._log}:\n{tail}")


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """Let the server run in the block only."""
    server.send(signal.SIGCONT)
    try:
        yield
    finally:
        server.send(signal.SIGSTOP)


def free_port() -> int:
    """One that is free with its successor."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
