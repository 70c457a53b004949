"""The real Prometheus with this project's scrape configuration, for tests."""

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import programs
from loopback import free_port
from promql import RULES

START_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        response = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=START_S).json()
        assert response["status"] == "success", f"{parameters}: {response}"
        return response["data"]

    def query(self, expression: str) -> list[Any]:
        """What it gives now."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def wait(self, expression: str) -> None:
        """Until the expression gives something."""
        _until(lambda: bool(self.query(expression)), expression)

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/-/ready", timeout=START_S).status_code == httpx.codes.OK
        return False


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end, f"not within {START_S:g} s: {what}"
        time.sleep(POLL_S)


def scraping(targets: Mapping[str, str], directory: Path) -> contextlib.AbstractContextManager[Prometheus]:
    """With prometheus.yml as it is, but for addresses and how often it looks; `targets` are addresses by job."""
    text = (RULES.parent / "prometheus.yml").read_text(encoding="utf-8")
    for job, address in targets.items():
        text, num_found = re.subn(rf'(job_name: {job}\n.*targets: \[")[^"]*', rf"\g<1>{address}", text)
        assert num_found == 1, job
    return running(text, directory)


@contextlib.contextmanager
def running(text: str, directory: Path) -> Iterator[Prometheus]:
    """With this configuration, but for how often it looks."""
    text = re.sub(r"(_interval: )\d+s", r"\g<1>1s", text)
    (directory / "prometheus.yml").write_text(text, encoding="utf-8")
    (directory / RULES.name).write_bytes(RULES.read_bytes())
    address = f"127.0.0.1:{free_port()}"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                programs.find("prometheus"),
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        prometheus = Prometheus(f"http://{address}")
        _until(prometheus.is_ready, "Prometheus is ready")
        yield prometheus
    except BaseException as error:
        error.add_note((directory / "log").read_text(encoding="utf-8")[-3000:])
        raise
    finally:
        process.terminate()
        process.wait(START_S)
