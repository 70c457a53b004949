"""Configuration: one frozen, flat, checked dataclass per concern; `read_config` fills them."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from pageferry.core.addresses import parse_worker
from pageferry.core.drafts import DraftSource
from pageferry.core.errors import invalid
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import MAX_FRAME_BYTES
from pageferry.core.ports import MAX_PORT, has_ip
from pageferry.core.security import SecurityConfig

COMPUTE_DTYPES = ("auto", "fp32", "bf16")
KERNELS = ("auto", "cpu", "torch")
TRANSPORTS = ("auto", "inline", "shm")
UNKNOWN_FIELDS = ("refuse", "ignore")
LOG_LEVELS = ("debug", "info", "warning", "error")
_COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SECRETS = ("salt_key",)
_MAX_SECONDS = 86_400.0
_MAX_LAYERS = 4096


def _check_ranges(section: object, **limits: tuple[float, float]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(section, name)
        if not low <= value <= high:
            limit = f"must be at least {low}" if high == math.inf else f"must be from {low} to {high}"
            raise invalid(name, value, limit)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise invalid(name, value, f"must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    advertised_host: str = ""  # where peers reach this process; empty: host, which must then be one address
    advertised_port: int = 0  # the same; 0: port
    port: int = 0  # 0: one that is free
    http_port: int = 0  # router only; 0: off
    health_port: int = 0  # health alone, without TLS, for probes; 0: on `port` only
    drain_grace_s: float = 30.0
    connection_age_s: float = 0.0  # router: when to have clients connect anew, which then look up names again; 0: never
    stall_s: float = 8.0  # after which an engine that has work and makes no progress is no longer SERVING
    max_message_bytes: int = 4 * 2**20  # a frame of a page must pass
    unknown_fields: str = "refuse"  # of bodies over HTTP; ignore: answers tell them in x-ignored-fields
    page: bool = True  # the router's page at / of its HTTP port
    cors_origins: tuple[str, ...] = ()  # whose pages' scripts may call over HTTP, as https://example.org; *: anybody's

    def __post_init__(self) -> None:
        if not self.host:
            raise invalid("host", self.host, "must be an address to listen on")
        _check_choice("unknown_fields", self.unknown_fields, UNKNOWN_FIELDS)
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s,*]+", origin):
                raise invalid("cors_origins", origin, "must be scheme://host, with :port if need be, or *")
        _check_ranges(
            self,
            port=(0, MAX_PORT),
            http_port=(0, MAX_PORT),
            advertised_port=(0, MAX_PORT),
            health_port=(0, MAX_PORT),
            stall_s=(0.1, _MAX_SECONDS),
            drain_grace_s=(0, _MAX_SECONDS),
            connection_age_s=(0, _MAX_SECONDS),
            max_message_bytes=(MAX_FRAME_BYTES + 2**16, 2**31 - 1),
        )


def _check_cache_layers(text: str) -> None:
    """All that can be told without the model: that it has no more layers than are named is taken for granted."""
    named = [int(number) for part in text.split(";") for number in re.findall(r"[0-9]+", part.partition("=")[0])]
    parse_groups(text, min(max(named, default=0) + 1, _MAX_LAYERS), None)


def _check_device(device: str) -> None:
    if not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", device):
        raise invalid("device", device, "must be cpu, or cuda:N with the number of a GPU")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = "smollm2"  # a directory, a .gguf file, or the packaged model's name
    page_format: str = "int8"  # or fp32, bf16, fp16, fp8_e4m3, int4; :channel, :asym behind it; k=FORMAT,v=FORMAT
    cache_layers: str = ""  # 0-14=window:256,sinks:4;15-29=full; empty: all that the model's own window keeps
    page_size: int = 16
    num_pages: int = 0  # 0: what `kv_memory_mb` holds
    kv_memory_mb: int = 512  # 0: as much as is there, or as max_num_seqs sequences of full length need
    memory_share: float = 1.0  # of what is there, if kv_memory_mb is 0: for weights and all; `up` divides it
    threads: int = 0  # 0: all cores that the process is given
    device: str = "cpu"  # or cuda:N
    compute_dtype: str = "auto"  # fp32, bf16; auto: a file's own groups, else bf16 where it is native
    kernels: str = "auto"  # cpu: the compiled ones; torch: without them; auto: compiled where they are there and faster
    max_model_tokens: int = 0  # 0: the model's own
    speculation: str = "lookup"  # where a decode worker's drafts come from: off, lookup, layers:N, draft:PATH
    max_draft_tokens: int = 8  # most of a sequence in a step

    def __post_init__(self) -> None:
        if not self.model:
            raise invalid("model", self.model, "must be a directory, a .gguf file or a packaged model's name")
        PageFormat.parse(self.page_format)
        _check_cache_layers(self.cache_layers)
        _check_device(self.device)
        DraftSource.parse(self.speculation)
        _check_choice("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _check_choice("kernels", self.kernels, KERNELS)
        _check_ranges(
            self,
            page_size=(1, 1024),
            num_pages=(0, math.inf),
            kv_memory_mb=(0, math.inf),
            memory_share=(1e-6, 1.0),
            threads=(0, 1024),
            max_model_tokens=(0, math.inf),
            max_draft_tokens=(1, 64),
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 32  # sequences at once
    max_prefills: int = 32  # prompts that a prefill worker computes at once, if max_num_seqs lets it
    max_waiting: int = 256  # sequences that wait; one more is refused
    chunk_tokens: int = 256  # most prompt tokens of one step on a prefill worker
    final_chunk_tokens: int = 64  # left for a long prompt's last chunk, so that few pages are shipped after it; 0: off
    local_chunk_tokens: int = 128  # most of one step on a decode worker
    batch_window_ms: float = 0.0  # how long a prefill step waits for company
    headroom_pages: int = 1  # pages beyond the prompt that a reservation takes
    ageing_tokens_per_s: float = 250.0  # how fast a waiting prompt gains on shorter ones
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _check_ranges(
            self,
            max_num_seqs=(1, 4096),
            max_prefills=(1, 4096),
            max_waiting=(0, math.inf),
            chunk_tokens=(1, math.inf),
            final_chunk_tokens=(0, math.inf),
            local_chunk_tokens=(1, math.inf),
            batch_window_ms=(0, 60_000),
            headroom_pages=(0, math.inf),
            ageing_tokens_per_s=(0, 1e9),
        )


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    lease_ms: int = 30_000  # without a message of a push; then its pages are freed
    max_frames_in_flight: int = 64  # that travel inline; shared memory bounds itself
    transport: str = "auto"  # inline: in messages; shm: through shared memory; auto: that where it is possible
    reservation_ms: int = 60_000  # for a push to begin; then the pages reserved for it are freed

    def __post_init__(self) -> None:
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_ranges(self, lease_ms=(1, 3_600_000), reservation_ms=(1, 3_600_000), max_frames_in_flight=(1, 1024))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    prefill: tuple[str, ...] = ()  # host:port each, or dns:///name:port for all addresses behind a name
    decode: tuple[str, ...] = ()
    max_queue: int = 1024  # requests that wait; one more is refused
    prefill_retries: int = 1  # on another prefill worker, before the decode worker computes the prompt
    resumes: int = 1  # of a request whose decode worker died, on another one; 0: it fails
    max_unread_tokens: int = 4096  # kept for a client that doesn't read its answer; beyond, the request ends
    local_prefill_tokens: int = 32  # uncached prompt tokens up to which the decode worker computes them itself
    local_advantage: float = 2.0  # times faster that it must be predicted to be, to compute longer ones; 1e9: never
    max_prompt_bytes: int = 1 << 20  # of prompt text, before tokenising
    salt_key: str = ""  # secret behind cache salts, the same on all routers of the same workers; empty: drawn at start
    chat_template: str = ""  # a file, whose template goes in place of the model's
    profiles_file: str = ""  # TOML, how requests of each kind are served; empty: those built in
    discovery_s: float = 2.0  # between looks at the addresses behind a name, of workers given as dns:///NAME:PORT
    picker_port: int = 0  # HTTP port of the router beside each decode worker, for gateways that ask where to; 0: off
    picker_wait_s: float = 1.0  # that a gateway's request waits for room before it is refused
    normalise_system: bool = True  # even out a system prompt's outer whitespace and line ends, so that equal ones share

    def __post_init__(self) -> None:
        for name, addresses in (("prefill", self.prefill), ("decode", self.decode)):
            for address in addresses:
                parse_worker(name, address)
                if name == "decode" and self.picker_port and not (has_ip(address) or address.startswith("dns:")):
                    limit = "must have an IP address for host, or be dns:///NAME:PORT, where picker_port is set"
                    raise invalid(name, address, limit)  # gateways know endpoints by address
        _check_ranges(
            self,
            max_queue=(1, math.inf),
            prefill_retries=(0, 100),
            resumes=(0, 100),
            max_unread_tokens=(1, math.inf),
            local_prefill_tokens=(0, math.inf),
            local_advantage=(1, 1e9),
            max_prompt_bytes=(1, math.inf),
            discovery_s=(0.1, _MAX_SECONDS),
            picker_port=(0, MAX_PORT),
            picker_wait_s=(0, _MAX_SECONDS),
        )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    otlp_endpoint: str = ""  # host:port or URL; the workers' is the router where no collector is set
    metrics_port: int = 0  # 0: off (the router serves /metrics on its HTTP port)
    max_traces: int = 256  # that the router keeps in memory, of 64 MiB at most, and those of live requests beside them
    kept_traces: int = 64  # of them, for requests that failed or were slow, when others would push these out
    slow_request_s: float = 10.0  # from when on a request is slow
    sample_ratio: float = 1.0  # of the requests whose caller says nothing of sampling, those with a trace
    trace_steps: bool = False  # workers also trace each step of a batch, linked to its requests
    trace_url: str = ""  # where a collector shows a trace, as https://host/trace/{trace_id}; the page links there
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_ranges(self, metrics_port=(0, MAX_PORT), max_traces=(1, math.inf), kept_traces=(0, math.inf))
        _check_ranges(self, slow_request_s=(0, _MAX_SECONDS), sample_ratio=(0.0, 1.0))
        if self.trace_url and "{trace_id}" not in self.trace_url:
            raise invalid("trace_url", self.trace_url, "must hold {trace_id}")


def collector_of(environment: Mapping[str, str]) -> str:
    """The collector that a variable of OpenTelemetry's names, which wins over ours; empty where none does."""
    return next((environment[name] for name in _COLLECTOR_VARIABLES if environment.get(name)), "")


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def describe(self) -> dict[str, object]:
        """Every field by its "section.field", for one line of log at start, with "***" for a secret."""
        return {
            f"{section.name}.{name}": "***" if name in _SECRETS and value else value
            for section in fields(self)
            for name, value in asdict(getattr(self, section.name)).items()
        }
