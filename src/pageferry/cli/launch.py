"""What `up` starts: a configuration, a port and a share of the cores for each process."""

import contextlib
import json
import os
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pageferry.cli.supervisor import ChildSpec
from pageferry.core.config import Config, EngineConfig, ServerConfig, collector_of
from pageferry.core.cores import num_cores
from pageferry.core.errors import InvalidArgumentError, UnavailableError, invalid
from pageferry.core.groups import parse_groups
from pageferry.core.model_files import load_config_of, resolve_model

_LOOPBACK = "127.0.0.1"
MAX_WORKERS = 64  # of a role, on one machine


@dataclass(frozen=True, slots=True)
class Launch:
    """A router with its workers, before they are processes; ports are chosen, and stay."""

    router: Config
    workers: Mapping[str, Config]  # by role, e.g. "decode-0"

    @property
    def address(self) -> str:
        """Where clients on this machine reach the router."""
        return f"{_reachable(self.router.server.host)}:{self.router.server.port}"

    @property
    def http_url(self) -> str:
        """Empty where HTTP is off."""
        server = self.router.server
        scheme = "https" if self.router.security.cert_file else "http"
        return f"{scheme}://{_reachable(server.host)}:{server.http_port}" if server.http_port else ""

    @property
    def page_url(self) -> str:
        """Empty where the router has no page."""
        return f"{self.http_url}/" if self.http_url and self.router.server.page else ""

    @property
    def client_files(self) -> dict[str, str]:
        """What clients on this machine may show and trust, as the client library takes it: what the services do."""
        security = self.router.security
        if not security.cert_file:
            return {}
        trusted = security.ca_file or ssl.get_default_verify_paths().openssl_cafile
        names = {"cert": security.cert_file, "key": security.key_file, "server_name": security.server_name}
        return {"ca": trusted} | names

    def specs(self, directory: Path, environment: Mapping[str, str]) -> list[ChildSpec]:
        """Write each process's configuration into the directory; the router comes first."""
        return [
            _spec(role, config, directory, environment)
            for role, config in {"router": self.router, **self.workers}.items()
        ]


def plan(
    base: Config,
    num_prefill: int,
    num_decode: int,
    environment: Mapping[str, str],
    devices: Mapping[str, str | None] | None = None,
) -> Launch:
    """Choose ports, and shares of cores and memory.

    Raises PageferryError where the model, its cache layers or a port can't be had.

    `devices` of "prefill" and of "decode" workers are separated by commas and go round; None: the configuration's.
    """
    roles = _roles(num_prefill, num_decode)
    _check_model(base.engine)
    server, ports = _ports(base.server, roles)
    router = replace(
        base,
        server=server,
        router=replace(base.router, prefill=_addresses(ports, "prefill-"), decode=_addresses(ports, "decode-")),
        telemetry=replace(base.telemetry, metrics_port=0),
    )
    launch = Launch(router, {})
    endpoint = base.telemetry.otlp_endpoint or ("" if collector_of(environment) else launch.address)
    engines = _engines(base, roles, devices or {})
    workers = {
        role: replace(
            base,
            server=replace(server, host=_LOOPBACK, port=worker_port, http_port=0, health_port=0),
            engine=engines[role],
            telemetry=replace(base.telemetry, otlp_endpoint=endpoint, metrics_port=_metrics_port(base, index)),
        )
        for index, (role, worker_port) in enumerate(ports.items())
    }
    return replace(launch, workers=workers)


def _engines(base: Config, roles: list[str], devices: Mapping[str, str | None]) -> dict[str, EngineConfig]:
    """Each worker's: with a share of the cores, and of its device's memory."""
    threads = base.engine.threads or max(1, num_cores() // len(roles))
    places = {role: _device(base, role, devices) for role in roles}
    num_sharing = Counter(places.values())
    return {
        role: replace(
            base.engine, threads=threads, device=device, memory_share=base.engine.memory_share / num_sharing[device]
        )
        for role, device in places.items()
    }


def _check_model(engine: EngineConfig) -> None:
    """Raise InvalidArgumentError where there is no such model, or it hasn't the layers that are named."""
    files = resolve_model(engine.model)
    if engine.cache_layers:
        model = load_config_of(files)
        parse_groups(engine.cache_layers, model.num_layers, model.sliding_window)


def _ports(server: ServerConfig, roles: list[str]) -> tuple[ServerConfig, dict[str, int]]:
    """Those of the router, in its settings, and those of the workers; all held open at once, so that they differ."""
    with contextlib.ExitStack() as held:
        port = _hold(held, server.host, server.port, "--port")
        http_port = _hold(held, server.host, server.http_port, "--http-port") if server.http_port else 0
        workers = {role: _hold(held, _LOOPBACK, 0, role) for role in roles}
    return replace(server, port=port, http_port=http_port), workers


def _roles(num_prefill: int, num_decode: int) -> list[str]:
    if not 0 <= num_prefill <= MAX_WORKERS:
        raise invalid("--prefill", num_prefill, f"must be from 0 (decode workers compute prompts) to {MAX_WORKERS}")
    if not 1 <= num_decode <= MAX_WORKERS:
        raise invalid("--decode", num_decode, f"must be from 1 to {MAX_WORKERS}")
    return [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]


def _device(base: Config, role: str, devices: Mapping[str, str | None]) -> str:
    """The device of a worker such as "decode-0"."""
    kind, _, number = role.partition("-")
    given = devices.get(kind)
    if given is None:
        return base.engine.device
    try:
        choices = [replace(base.engine, device=device.strip()).device for device in given.split(",")]
    except InvalidArgumentError:
        raise invalid(f"--{kind}-devices", given, "must be cpu or cuda:N, separated by commas") from None
    return choices[int(number) % len(choices)]


def to_toml(config: Config) -> str:
    """The configuration as the file that services read."""
    lines = []
    for section, values in asdict(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _spec(role: str, config: Config, directory: Path, environment: Mapping[str, str]) -> ChildSpec:
    path = directory / f"{role}.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    module = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}[role.partition("-")[0]]
    command = (sys.executable, "-m", f"pageferry.{module}", "--config", str(path), f"--die-with-parent={os.getpid()}")
    threads = 1 if role == "router" else config.engine.threads
    # The settings are in the file; a variable would win over it, in every process alike.
    inherited = {name: value for name, value in environment.items() if not name.startswith("PAGEFERRY_")}
    own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    return ChildSpec(role, command, inherited | own)


def _hold(held: contextlib.ExitStack, host: str, port: int, name: str) -> int:
    """Bind a port until the stack ends, to see that it can be had, and to learn its number."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections don't count
    try:
        holder.bind((host, port))
    except OSError as error:
        message = f"{name} {port} on {host} can't be had: {error.strerror}; choose another"
        raise UnavailableError(message, reason="PORT_UNAVAILABLE") from None
    return int(holder.getsockname()[1])


def _addresses(ports: Mapping[str, int], prefix: str) -> tuple[str, ...]:
    return tuple(f"{_LOOPBACK}:{port}" for role, port in ports.items() if role.startswith(prefix))


def _metrics_port(base: Config, index: int) -> int:
    return base.telemetry.metrics_port + index if base.telemetry.metrics_port else 0


def _reachable(host: str) -> str:
    return _LOOPBACK if host in ("0.0.0.0", "::") else host
