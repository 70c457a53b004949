"""Configuration: one frozen, flat, checked dataclass per concern, read from TOML, then environment, then flags."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 0  # 0: one that is free
    http_port: int = 0  # router only; 0: off
    drain_grace_s: float = 30.0
    max_message_bytes: int = 4 * 2**20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = "smollm2"  # a directory, a .gguf file, or the packaged model's name
    page_format: str = "int8"
    page_size: int = 16
    num_pages: int = 0  # 0: what `kv_memory_mb` holds
    kv_memory_mb: int = 512
    threads: int = 0  # 0: all cores
    compute_dtype: str = "auto"  # fp32, bf16; auto: bf16 where the processor computes it natively
    max_model_tokens: int = 0  # 0: the model's own


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 32  # sequences at once
    max_waiting: int = 256  # sequences that wait; one more is refused
    chunk_tokens: int = 256  # most prompt tokens of one step on a prefill worker
    local_chunk_tokens: int = 128  # the same on a decode worker
    batch_window_ms: float = 0.0  # how long a prefill step waits for company
    headroom_pages: int = 1  # pages beyond the prompt that a reservation takes
    ageing_tokens_per_s: float = 1000.0  # how fast a waiting prompt gains on shorter ones
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    lease_ms: int = 30_000
    max_frames_in_flight: int = 16


@dataclass(frozen=True, slots=True)
class RouterConfig:
    prefill: tuple[str, ...] = ()  # host:port each
    decode: tuple[str, ...] = ()
    max_queue: int = 1024  # requests that wait; one more is refused
    prefill_retries: int = 1  # on another prefill worker, before the decode worker computes the prompt
    local_prefill_tokens: int = 32  # uncached prompt tokens up to which the decode worker computes them itself
    max_prompt_bytes: int = 1 << 20  # of prompt text, before tokenising


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    otlp_endpoint: str = ""  # host:port or URL; the workers' is the router where no collector is set
    metrics_port: int = 0  # 0: off (the router serves /metrics on its HTTP port)
    max_traces: int = 256  # that the router keeps in memory
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


def load_config(path: Path | None, environment: dict[str, str], overrides: dict[str, object]) -> Config:
    """Read TOML `[section] field`, then `PAGEFERRY_SECTION_FIELD`, then overrides keyed "section.field".

    Raises InvalidArgumentError naming the file or variable, the field, the value and the limit.
    """
    raise NotImplementedError
