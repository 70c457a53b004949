"""What a run measured, as the file of `pageferry bench --json` has it; times are milliseconds unless named `_s`."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.reading import parse, read_as

SCHEMA = "pageferry.bench/1"
MS = 1000.0  # of a second


@dataclass(frozen=True, slots=True)
class Target:
    kind: str  # "grpc" or "openai"
    address: str
    model: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the load came from; with a server on loopback, the server's too."""

    cpu: str
    cores: int
    memory_bytes: int
    platform: str
    python: str


@dataclass(frozen=True, slots=True)
class Record:
    """One counted request. `start_s` counts from the start of the run.

    `gaps_ms` lie between the arrivals of its pieces of output, one less than there were pieces. A failed request keeps
    what had come of it; `e2e_ms` is then the time until it failed.
    """

    start_s: float
    ttft_ms: float | None
    e2e_ms: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    gaps_ms: tuple[float, ...]
    error: str | None

    @property
    def tpot_ms(self) -> float | None:
        """From the first token to the last, by the tokens after the first; None without such tokens."""
        return sum(self.gaps_ms) / (self.output_tokens - 1) if self.output_tokens > 1 and self.gaps_ms else None


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine and the server at one moment; CPU percentages are of all cores together."""

    t_s: float
    machine_cpu_percent: float
    server_cpu_percent: float | None
    running: int | None
    waiting: int | None
    pages_used: int | None
    gpu_percent: float | None


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution; all but `count` are None where there was no value."""

    count: int
    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep; None where there is no such limit. `itl_ms` is for its time per output token."""

    ttft_ms: float | None
    itl_ms: float | None
    e2e_ms: float | None

    def keeps(self, record: Record) -> bool:
        """Whether the request ended well within every limit; one without a second token keeps `itl_ms`."""
        if record.error is not None or record.ttft_ms is None:
            return False
        pairs = ((record.ttft_ms, self.ttft_ms), (record.tpot_ms, self.itl_ms), (record.e2e_ms, self.e2e_ms))
        return all(limit is None or value is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True, slots=True)
class Goodput:
    slo: Slo
    share: float  # of all requests, failed ones among them
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class BatchSize:
    """In how many samples of a decode worker how many sequences ran on it; samples in which none did don't count."""

    counts: Mapping[str, int]
    mean: float

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> "BatchSize | None":
        """From samples by size; None without a sample."""
        num_samples = sum(counts.values())
        if not num_samples:
            return None
        mean = sum(size * count for size, count in counts.items()) / num_samples
        return cls({str(size): count for size, count in sorted(counts.items()) if count}, mean)


@dataclass(frozen=True, slots=True)
class Pages:
    used_max: int
    used_mean: float
    total: int


@dataclass(frozen=True, slots=True)
class Cpu:
    machine_percent_mean: float
    server_seconds: float | None
    client_seconds: float


@dataclass(frozen=True, slots=True)
class Gpu:
    percent_mean: float
    memory_bytes_max: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the whole run. Tokens and times are those of completed requests only."""

    duration_s: float  # from the first request's start to the last one's end
    requests: int
    completed: int
    failed: int
    errors: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: Goodput | None
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    send_lag_ms: Spread | None  # behind the schedule; None in a closed loop
    batch_size: BatchSize | None
    pages: Pages | None
    cpu: Cpu
    gpu: Gpu | None
    foreign_cpu_percent: float | None  # of the machine, by neither the server nor this process


@dataclass(frozen=True, slots=True)
class Trial:
    rate: float  # requests/s
    share: float  # of its requests that kept the limits
    kept: bool  # whether that share is enough


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    rate: float | None  # the highest that was kept; None where none was
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    schema: str
    label: str
    started: str  # ISO 8601, with its offset
    command: str
    target: Target
    load: Mapping[str, object]  # the options as given
    machine: Machine
    summary: Summary
    requests: tuple[Record, ...]
    samples: tuple[Sample, ...]
    goodput_search: GoodputSearch | None
    notes: tuple[str, ...]  # sentences that a reader of the figures must know

    def to_json(self) -> str:
        """One line a field, so that a pager shows the summary of a long run."""
        pairs = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        lines = [f"{json.dumps(name)}: {_dumps(value)}" for name, value in pairs]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, where: str = "result") -> "BenchResult":
        """Raises InvalidArgumentError naming `where` the text is from, and the field."""
        value = parse(text, where)
        schema = value.get("schema") if isinstance(value, dict) else None
        if schema != SCHEMA:
            found = "none" if schema is None else json.dumps(schema)[:60]
            raise InvalidArgumentError(f"{where}: schema is {found}, must be {json.dumps(SCHEMA)}")
        return read_as(cls, value, f"{where}:")

    @classmethod
    def read(cls, path: Path) -> "BenchResult":
        """From a file of `--json`."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError(f"{path} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"{path} is not JSON: byte {error.start} is not UTF-8") from error
        return cls.from_json(text, str(path))


def _dumps(value: object) -> str:
    return json.dumps(value, default=_fields, allow_nan=False, ensure_ascii=False)


def _fields(value: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
