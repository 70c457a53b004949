from dataclasses import fields
from pathlib import Path

import pytest

from pageferry.core.config import Config, EngineConfig, RouterConfig, SchedulerConfig, ServerConfig
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.read_config import load_config


def write(directory: Path, text: str) -> Path:
    path = directory / "pageferry.toml"
    path.write_text(text)
    return path


def refused(
    path: Path | None = None, environment: dict[str, str] | None = None, overrides: dict[str, object] | None = None
) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        load_config(path, environment or {}, overrides or {})
    return caught.value.message


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(None, {}, {}) == Config()


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[server]\nport = 1\nhttp_port = 1\nhost = "::1"\n[scheduler]\nbatch_window_ms = 2\n'
        '[router]\ndecode = ["a:1", "b:2"]\n',
    )
    environment = {"PAGEFERRY_SERVER_PORT": "2", "PAGEFERRY_SERVER_HTTP_PORT": "2", "PATH": "/bin"}
    config = load_config(path, environment, {"server.port": 3})
    assert config.server == ServerConfig(host="::1", port=3, http_port=2)
    assert config.scheduler == SchedulerConfig(batch_window_ms=2.0)
    assert type(config.scheduler.batch_window_ms) is float
    assert config.router == RouterConfig(decode=("a:1", "b:2"))
    assert config.engine == EngineConfig()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("engine.num_pages", "12", 12),
        ("engine.model", "12", "12"),
        ("server.drain_grace_s", "1.5", 1.5),
        ("scheduler.prefix_cache", "false", False),
        ("scheduler.prefix_cache", "1", True),
        ("router.prefill", "a:1, [::1]:2", ("a:1", "[::1]:2")),
        ("router.prefill", "", ()),
    ],
)
def test_a_text_becomes_its_fields_type(key: str, text: str, value: object) -> None:
    variable = "PAGEFERRY_" + key.replace(".", "_").upper()
    for config in (load_config(None, {variable: text}, {}), load_config(None, {}, {key: text})):
        assert config.describe()[key] == value
        assert type(config.describe()[key]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprt = 1\n", "[server] has no field 'prt', but host, "),
        ("[sever]\nport = 1\n", "there is no section 'sever', but server, "),
        ("port = 1\n", "port stands outside a section"),
        ("[server]\nport = true\n", "server.port is True, must be a whole number"),
        ("[server]\nport = 1.0\n", "server.port is 1.0, must be a whole number"),
        ("[server]\nhost = 1\n", "server.host is 1, must be a text"),
        ("[scheduler]\nprefix_cache = 1\n", "scheduler.prefix_cache is 1, must be true or false"),
        ("[router]\ndecode = [1]\n", "router.decode is [1], must be a list of texts"),
        ("[server]\ndrain_grace_s = 1" + "0" * 400, "server.drain_grace_s is a number of 1329 bits, must be a number"),
        (
            "[engine]\nkv_memory_mb = 0x" + "f" * 5000,
            "engine.kv_memory_mb is a number of 20000 bits, must be of at most 63 bits",
        ),
        ("[server]\nport = 65536\n", "server.port is 65536, must be from 0 to 65535"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert refused(path).startswith(f"{path}: {message}")


@pytest.mark.parametrize("text", ["[server\n", "\xff", "x = " + "[" * 50_000, "x = " + "1" * 5000])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pageferry.toml"
    path.write_bytes(text.encode("latin-1"))
    assert refused(path).startswith(f"configuration file {path} cannot be read: ")
    assert refused(tmp_path / "missing.toml").startswith(f"configuration file {tmp_path}/missing.toml cannot be read: ")


def test_a_bad_variable_or_option_is_named() -> None:
    assert refused(environment={"PAGEFERRY_SERVER_PORT": "x"}) == (
        "environment variable PAGEFERRY_SERVER_PORT: server.port is 'x', must be a whole number"
    )
    assert refused(environment={"PAGEFERRY_HANDOFF_LEASE_MS": "0"}) == (
        "environment variable PAGEFERRY_HANDOFF_LEASE_MS: handoff.lease_ms is 0, must be from 1 to 3600000"
    )
    assert refused(environment={"PAGEFERRY_PORT": "1"}).startswith(
        "environment variable PAGEFERRY_PORT: there is no section 'port'"
    )
    assert (
        refused(overrides={"engine.threads": -1})
        == "option engine.threads: engine.threads is -1, must be from 0 to 1024"
    )
    assert refused(overrides={"scheduler.prefix_cache": "yes"}) == (
        "option scheduler.prefix_cache: scheduler.prefix_cache is 'yes', must be true or false"
    )


def test_the_violation_names_section_and_field() -> None:
    for value in ("x", 65536):
        with pytest.raises(InvalidArgumentError) as caught:
            load_config(None, {}, {"server.port": value})
        assert [violation.field for violation in caught.value.violations] == ["server.port"]


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("server.host", "", "must be an address to listen on"),
        ("server.max_message_bytes", 2**20, "must be from 1114112 to 2147483647"),
        ("server.drain_grace_s", float("inf"), "must be from 0 to 86400.0"),
        ("engine.model", "", "must be a directory, a .gguf file or a packaged model's name"),
        ("engine.page_format", "k=int8", "must be FORMAT, or k=FORMAT,v=FORMAT"),
        ("engine.compute_dtype", "fp16", "must be one of auto, fp32, bf16"),
        ("engine.page_size", 0, "must be from 1 to 1024"),
        ("engine.num_pages", -1, "must be at least 0"),
        ("scheduler.max_num_seqs", 0, "must be from 1 to 4096"),
        ("scheduler.chunk_tokens", 0, "must be at least 1"),
        ("scheduler.batch_window_ms", float("nan"), "must be from 0 to 60000"),
        ("router.prefill", ["localhost"], "must be host:port or dns:///name:port with a port from 1 to 65535"),
        ("router.decode", [":1"], "must be host:port or dns:///name:port with a port from 1 to 65535"),
        ("router.decode", ["a:0"], "must be host:port or dns:///name:port with a port from 1 to 65535"),
        ("telemetry.log_level", "loud", "must be one of debug, info, warning, error"),
    ],
)
def test_a_value_beyond_its_limit_is_refused(key: str, value: object, limit: str) -> None:
    message = refused(overrides={key: value})
    assert message.startswith(f"option {key}: {key} is ")
    assert message.endswith(limit)


def test_describe_has_every_field_of_every_section() -> None:
    described = Config().describe()
    for section in fields(Config):
        for field in fields(getattr(Config(), section.name)):
            assert described.pop(f"{section.name}.{field.name}") == getattr(getattr(Config(), section.name), field.name)
    assert described == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all=full", "must name layers as 3 or 0-14, not 'all'"),
        ("0-3", "must be LAYERS=POLICY"),
        ("0-3=full;3-5=window:8", "but layer 3 stands there twice"),
        ("0-3=full;6=window:8", "must name each of the 7 layers, once; missing: 4-5"),
        ("0=window:0", "must be from 1 to 2147483647"),
        ("0=sinks:4", "must have full, window:W or window:W,sinks:S"),
        ("0-99999999999=full", "must be layers from 0 to 4095"),
    ],
)
def test_cache_layers_are_checked_as_far_as_they_can_be_without_a_model(text: str, message: str) -> None:
    error = refused(overrides={"engine.cache_layers": text})
    assert error.startswith("option engine.cache_layers: engine.cache_layers is ") and message in error
    assert EngineConfig(cache_layers="0-14=window:256,sinks:4;15-29=full").cache_layers


@pytest.mark.parametrize("device", ["", "cuda", "cuda:", "cuda:-1", "gpu:0", "cuda:0,cuda:1"])
def test_a_device_is_cpu_or_a_numbered_gpu(device: str) -> None:
    assert "must be cpu, or cuda:N with the number of a GPU" in refused(overrides={"engine.device": device})
    assert EngineConfig(device="cuda:3").device == "cuda:3"


@pytest.mark.parametrize("key", ["engine.cache_layers", "router.decode"])
def test_a_text_of_more_digits_than_a_number_may_have_is_refused(key: str) -> None:
    message = refused(overrides={key: "9" * 5000})
    assert f"{key} has a text of more than 4096 characters" in message
