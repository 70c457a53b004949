import argparse
import os
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import free_port

from pageferry.cli import up
from pageferry.cli.launch import plan, to_toml
from pageferry.core.config import Config, EngineConfig, ServerConfig, TelemetryConfig
from pageferry.core.cores import num_cores
from pageferry.core.errors import InvalidArgumentError, PageferryError, UnavailableError
from pageferry.core.read_config import load_config

SERVER = ServerConfig(port=0, http_port=0)


def base(tiny_model: Path, **sections: object) -> Config:
    return Config(server=SERVER, engine=EngineConfig(model=str(tiny_model)), **sections)


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_command(parser)
    return parser.parse_args(argv)


def test_every_process_has_its_configuration(tiny_model: Path, tmp_path: Path) -> None:
    launch = plan(base(tiny_model), 1, 2, {})
    assert list(launch.workers) == ["prefill-0", "decode-0", "decode-1"]
    ports = [config.server.port for config in (launch.router, *launch.workers.values())]
    assert len({*ports}) == 4 and all(ports)
    assert launch.router.router.prefill == (f"127.0.0.1:{ports[1]}",)
    assert launch.router.router.decode == (f"127.0.0.1:{ports[2]}", f"127.0.0.1:{ports[3]}")
    assert launch.address == f"127.0.0.1:{ports[0]}" and launch.http_url == ""
    assert {config.telemetry.otlp_endpoint for config in launch.workers.values()} == {launch.address}
    assert {config.engine.threads for config in launch.workers.values()} == {max(1, num_cores() // 3)}

    environment = {"HOME": "/h", "PAGEFERRY_SERVER_PORT": "1", "OMP_NUM_THREADS": "64"}
    router, prefill, *_ = launch.specs(tmp_path, environment)
    assert (router.role, prefill.role) == ("router", "prefill-0")
    assert router.command[1:3] == ("-m", "pageferry.router")
    assert prefill.command[1:] == (
        *("-m", "pageferry.prefill_svc"),
        *("--config", str(tmp_path / "prefill-0.toml"), f"--die-with-parent={os.getpid()}"),
    )
    assert "PAGEFERRY_SERVER_PORT" not in prefill.environment and prefill.environment["HOME"] == "/h"
    assert prefill.environment["PYTHONSAFEPATH"] == "1"
    assert prefill.environment["OMP_NUM_THREADS"] == str(launch.workers["prefill-0"].engine.threads)
    assert load_config(tmp_path / "prefill-0.toml", {}, {}) == launch.workers["prefill-0"]
    assert load_config(tmp_path / "router.toml", {}, {}) == launch.router


def test_memory_is_shared_by_the_workers_of_a_device(tiny_model: Path) -> None:
    devices = {"prefill": "cuda:0,cuda:1", "decode": None}
    config = replace(base(tiny_model), engine=EngineConfig(model=str(tiny_model), kv_memory_mb=0, memory_share=0.8))
    shares = {role: worker.engine.memory_share for role, worker in plan(config, 3, 2, {}, devices).workers.items()}
    assert shares == {"prefill-0": 0.4, "prefill-1": 0.8, "prefill-2": 0.4, "decode-0": 0.4, "decode-1": 0.4}


def test_without_prefill_workers(tiny_model: Path) -> None:
    launch = plan(base(tiny_model), 0, 1, {})
    assert list(launch.workers) == ["decode-0"] and launch.router.router.prefill == ()
    assert launch.workers["decode-0"].engine.threads == num_cores()


def test_traces_go_to_a_collector_that_is_configured(tiny_model: Path) -> None:
    for environment, telemetry, endpoint in (
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, TelemetryConfig(), ""),
        ({}, TelemetryConfig(otlp_endpoint="c:4317"), "c:4317"),
    ):
        launch = plan(base(tiny_model, telemetry=telemetry), 1, 1, environment)
        assert launch.workers["decode-0"].telemetry.otlp_endpoint == endpoint


def test_devices_go_round_the_workers_of_a_role(tiny_model: Path) -> None:
    devices = {"prefill": "cuda:0, cuda:1", "decode": None}
    launch = plan(base(tiny_model), 3, 2, {}, devices)
    assert [config.engine.device for config in launch.workers.values()] == ["cuda:0", "cuda:1", "cuda:0", "cpu", "cpu"]
    with pytest.raises(InvalidArgumentError, match="--decode-devices is 'cuda:0,gpu', must be cpu or cuda:N"):
        plan(base(tiny_model), 1, 1, {}, {"decode": "cuda:0,gpu"})


@pytest.mark.parametrize(
    ("http_port", "page", "told"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_page_is_told_where_there_is_one(tiny_model: Path, http_port: bool, page: bool, told: bool) -> None:
    port = free_port() if http_port else 0
    config = Config(server=ServerConfig(http_port=port, page=page), engine=EngineConfig(model=str(tiny_model)))
    assert plan(config, 1, 1, {}).page_url == (f"http://127.0.0.1:{port}/" if told else "")


def test_metrics_ports_differ(tiny_model: Path) -> None:
    launch = plan(base(tiny_model, telemetry=TelemetryConfig(metrics_port=9100)), 1, 1, {})
    assert [config.telemetry.metrics_port for config in launch.workers.values()] == [9100, 9101]
    assert launch.router.telemetry.metrics_port == 0


@pytest.mark.parametrize("option", ["port", "http_port"])
def test_a_port_in_use_is_named_before_anything_starts(tiny_model: Path, option: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = Config(server=ServerConfig(**{option: port}), engine=EngineConfig(model=str(tiny_model)))
        flag = "--" + option.replace("_", "-")
        with pytest.raises(UnavailableError, match=f"{flag} {port} on 127.0.0.1 can't be had: Address already in use"):
            plan(config, 1, 1, {})


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "message"),
    [
        (-1, 1, "--prefill is -1, must be from 0 .* to 64"),
        (65, 1, "--prefill is 65"),
        (1, 0, "--decode is 0, must be from 1 to 64"),
        (1, 10**20, "--decode is 1000"),
    ],
)
def test_numbers_of_workers_are_checked(tiny_model: Path, num_prefill: int, num_decode: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan(base(tiny_model), num_prefill, num_decode, {})


def test_cache_layers_are_checked_against_the_model_before_anything_starts(tiny_model: Path) -> None:
    config = replace(base(tiny_model), engine=EngineConfig(model=str(tiny_model), cache_layers="0-99=full"))
    with pytest.raises(InvalidArgumentError, match="cache_layers is '0-99', must be layers from 0 to"):
        plan(config, 1, 1, {})


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PageferryError, match="nowhere"):
        plan(Config(server=SERVER, engine=EngineConfig(model=str(tmp_path / "nowhere"))), 1, 1, {})


def test_toml_holds_any_text() -> None:
    engine = EngineConfig(model='/models/"a\\b"\t→ 😀')
    document = tomllib.loads(to_toml(Config(engine=engine)))
    assert document["engine"]["model"] == engine.model


def test_flags_win_over_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up.base_config(arguments()).server == ServerConfig(port=50051, http_port=8080)
    monkeypatch.setenv("PAGEFERRY_SERVER_PORT", "6000")
    monkeypatch.setenv("PAGEFERRY_SCHEDULER_CHUNK_TOKENS", "64")
    config = up.base_config(
        arguments(
            "--http-port", "0", "--pages", "bf16", "--cache-layers", "0=full", "--set", "router.local_prefill_tokens=0"
        )
    )
    assert (config.server.port, config.server.http_port) == (6000, 0)
    assert (config.engine.page_format, config.engine.cache_layers, config.scheduler.chunk_tokens) == (
        "bf16",
        "0=full",
        64,
    )
    assert config.router.local_prefill_tokens == 0
    assert up.base_config(arguments("--port", "7000")).server.port == 7000


def test_a_file_is_below_the_environment_and_above_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "up.toml"
    path.write_text('server = { port = 6000 }\nengine = { page_format = "bf16", page_size = 8, threads = 2 }\n')
    monkeypatch.setenv("PAGEFERRY_ENGINE_PAGE_SIZE", "32")
    config = up.base_config(arguments("--config", str(path), "--threads", "1"))
    assert config.server == ServerConfig(port=6000, http_port=8080)
    assert (config.engine.page_format, config.engine.page_size, config.engine.threads) == ("bf16", 32, 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--pages", "int9"), "--pages is 'int9', must be one of"),
        (("--pages", "bf16:channel"), "--pages"),
        (("--cache-layers", "0-1=windo:3"), "--cache-layers is '0-1=windo:3', must have full, window:W"),
        (("--kv-memory-mb", "-1"), "--kv-memory-mb is -1, must be at least 0"),
        (("--port", "70000"), "--port is 70000, must be from 0 to 65535"),
        (("--set", "engine"), "--set is 'engine', must be SECTION.FIELD=VALUE"),
        (("--set", "engine.colour=red"), "has no field 'colour'"),
    ],
)
def test_a_bad_flag_is_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        up.base_config(arguments(*argv))
    assert message in caught.value.message
