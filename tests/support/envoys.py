"""The real Envoy, running a configuration of deploy/envoy as it is shipped, at addresses of a test's own.

The rule for these: wherever the file has an `address` and a `port_value`, the pair is looked up as "address:port", and
wherever it has the text of a path, that. An endpoint with several places becomes as many endpoints.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import programs
import yaml
from cluster import POLL_S, environment

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "envoy"
ANY_PORT = "127.0.0.1:0"
ADMIN = "127.0.0.1:9901"
DESCRIPTORS = "/etc/envoy/pageferry.binpb"
TLS = "/etc/envoy-tls"
READY_S = 60.0
Places = Mapping[str, str | Sequence[str]]
Change = Callable[[dict[str, Any]], None]


def shipped(name: str) -> dict[str, Any]:
    """The file of that name, as data."""
    document: dict[str, Any] = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))
    return document


def placed(value: Any, places: Places) -> Any:
    """The same with a test's addresses and paths; what has no place is a mistake of the test."""
    if isinstance(value, dict):
        if set(value) == {"address", "port_value"}:
            return _socket_address(_several(places[f"{value['address']}:{value['port_value']}"])[0])
        return {key: placed(inner, places) for key, inner in value.items()}
    if isinstance(value, list):
        return [placed(item, of_each) for item in value for of_each in _each_place(item, places)]
    if isinstance(value, str) and value in places:
        return _several(places[value])[0]
    return value


def _each_place(item: Any, places: Places) -> Iterator[Places]:
    """For an endpoint with several places, the places with one of these each."""
    if isinstance(item, dict) and set(item) == {"endpoint"}:
        address = item["endpoint"]["address"]["socket_address"]
        key = f"{address['address']}:{address['port_value']}"
        for place in _several(places[key]):
            yield {**places, key: place}
    else:
        yield places


def _several(place: str | Sequence[str]) -> list[str]:
    return [place] if isinstance(place, str) else list(place)


def _socket_address(place: str) -> dict[str, Any]:
    host, _, port = place.rpartition(":")
    return {"address": host, "port_value": int(port)}


def write_descriptors(path: Path) -> None:
    """As `make descriptors` does."""
    subprocess.run([sys.executable, str(SHIPPED / "descriptors.py"), str(path)], check=True, env=environment())


class Envoy:
    """A process; use it as a context, on the main thread, since it ends with the thread that began it."""

    def __init__(
        self, name: str, places: Places, *, change: Change | None = None, command_prefix: Sequence[str] = ()
    ) -> None:
        """`change` may do to the configuration what a test is about."""
        self.name = name
        self._places = {ADMIN: ANY_PORT, **places}
        self._change = change
        self._prefix = command_prefix
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        self._wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        output = self.output
        self._directory.cleanup()
        assert "deprecated" not in output.lower(), output

    async def __aenter__(self) -> Self:
        """The same where what Envoy waits for is on this thread's event loop."""
        self._start()
        await asyncio.to_thread(self._wait_ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _start(self) -> None:
        envoy = programs.find("envoy")
        self._directory = tempfile.TemporaryDirectory(prefix="pageferry-envoy-")
        directory = Path(self._directory.name)
        if DESCRIPTORS not in self._places and self.name.startswith("edge"):
            write_descriptors(directory / "pageferry.binpb")
            self._places[DESCRIPTORS] = str(directory / "pageferry.binpb")
        document = placed(shipped(self.name), self._places)
        if self._change is not None:
            self._change(document)
        (directory / "envoy.json").write_text(json.dumps(document), encoding="utf-8")
        self._log = directory / "log"
        self._admin = directory / "admin"
        options = ("--disable-hot-restart", "--concurrency", "1", "--drain-time-s", "1", "-l", "warning")
        files = ("-c", str(directory / "envoy.json"), "--admin-address-path", str(self._admin))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._prefix, "setpriv", "--pdeathsig", "KILL", envoy, *files, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_ready(self) -> None:
        try:
            self._until(lambda: self._get("ready") == "LIVE\n", "is ready")
        except BaseException:
            self.__exit__()
            raise

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def admin(self) -> str:
        """host:port of its admin interface."""
        return self._admin.read_text(encoding="ascii").strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def port(self, listener: str) -> int:
        """Where it listens."""
        found = {status["name"]: status for status in self.ask("listeners?format=json")["listener_statuses"]}
        return int(found[listener]["local_address"]["socket_address"]["port_value"])

    def address(self, listener: str) -> str:
        return f"127.0.0.1:{self.port(listener)}"

    def ask(self, path: str) -> Any:
        """What the admin interface answers, as data."""
        return json.loads(self._get(path))

    def stat(self, name: str) -> int:
        """A counter or gauge; 0 where there is none yet."""
        stats = self.ask(f"stats?format=json&filter=^{name}$")["stats"]
        return int(stats[0]["value"]) if stats else 0

    def num_healthy(self, cluster: str) -> int:
        return self.stat(f"cluster.{cluster}.membership_healthy")

    def wait_healthy(self, cluster: str, number: int) -> None:
        self._until(lambda: self.num_healthy(cluster) == number, f"has {number} healthy in {cluster}")

    def is_flagged(self, cluster: str, address: str) -> bool:
        """Whether its last health check has taken this one of the cluster's hosts out."""
        (hosts,) = [found for found in self.ask("clusters?format=json")["cluster_statuses"] if found["name"] == cluster]
        for host in hosts["host_statuses"]:
            socket_address = host["address"]["socket_address"]
            if f"{socket_address['address']}:{socket_address['port_value']}" == address:
                return bool(host["health_status"].get("failed_active_health_check", False))
        raise AssertionError(f"{address} is no host of {cluster}")

    def wait_told(self, cluster: str, number: int) -> None:
        self._until(lambda: self.num_told(cluster) >= number, f"was told {number} times in {cluster}")

    def num_told(self, cluster: str) -> int:
        """Health checks that a host of the cluster has answered, and not with SERVING."""
        pattern = f"^cluster.{cluster}.health_check.(failure|network_failure)$"
        found = {
            stat["name"].rpartition(".")[2]: stat["value"]
            for stat in self.ask(f"stats?format=json&filter={pattern}")["stats"]
        }
        return int(found["failure"] - found["network_failure"])

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}/{path}", timeout=READY_S) as answer:
            return str(answer.read().decode())

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        assert self._process is not None
        end = time.monotonic() + READY_S
        while True:
            ended = self._process.poll() is not None
            try:
                if reached():
                    return
            except (OSError, ValueError, IndexError):  # it has not said where it listens, or does not listen yet
                pass
            assert not ended, f"{self.name} ended before it {what}:\n{self.output[-4000:]}"
            assert time.monotonic() < end, f"{self.name}: not within {READY_S} s that it {what}:\n{self.output[-4000:]}"
            time.sleep(POLL_S)


def edge_places(grpc: Sequence[str], http: Sequence[str], collector: str = "127.0.0.1:1") -> Places:
    """Of the edge, before routers at those addresses; without a collector its spans are lost."""
    return {
        "0.0.0.0:8080": ANY_PORT,
        "pageferry-routers:50051": grpc,
        "pageferry-routers:8080": http,
        "pageferry-collector:4317": collector,
    }


def place_tls(directory: Path) -> Places:
    """Of what the files with certificates name; the directory has tls.crt, tls.key and ca.crt, as cert-manager does."""
    places = {f"{TLS}/{name}": str(directory / name) for name in ("tls.crt", "tls.key", "ca.crt")} | {
        TLS: str(directory)
    }
    own = ("tls-own.yaml", "tls-trusted.yaml")
    for name in own:
        text = yaml.safe_dump(placed(shipped(name.removesuffix(".yaml")), places))
        (directory / name).write_text(text, encoding="utf-8")
    return {f"{TLS}/{name}": str(directory / name) for name in own}
