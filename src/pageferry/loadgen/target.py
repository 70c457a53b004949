"""What load is put on, and what is noted while one answer comes."""

from dataclasses import dataclass
from typing import Protocol

from pageferry.loadgen.result import MS, Target as TargetInfo


class RequestFailedError(Exception):
    """One request failed; the text is what failures are counted by, and so holds nothing of the request."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the tokens it is meant to have, and those its answer is to have."""

    prompt: str
    input_tokens: int
    output_tokens: int
    at_s: float | None = None  # when to send it, from the run's start; None in a closed loop
    seed: int | None = None  # where the temperature is above 0


class Answer:
    """What has come of one request: the time of every piece of output, and the counts that the server gives."""

    __slots__ = ("cached_tokens", "gaps_ms", "input_tokens", "last_s", "num_pieces", "output_tokens", "ttft_ms")

    def __init__(self, started_s: float) -> None:
        self.last_s = started_s  # of the last piece, by time.perf_counter
        self.ttft_ms: float | None = None
        self.gaps_ms: list[float] = []
        self.num_pieces = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None

    def take_piece(self, now_s: float) -> None:
        """Note a message that carries tokens.

        A gap lies between two such messages, however many tokens each has, as `vllm bench serve` measures: a reader
        waits for messages. What a token takes on average is computed from the counts, as time per output token.
        """
        passed_ms = (now_s - self.last_s) * MS
        if self.ttft_ms is None:
            self.ttft_ms = passed_ms
        else:
            self.gaps_ms.append(passed_ms)
        self.last_s = now_s
        self.num_pieces += 1


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server says of itself at one moment; pages are those of its decode workers."""

    running: int
    waiting: int
    batch_sizes: tuple[int, ...]  # sequences running on each decode worker
    pages_used: int
    pages_total: int


class Target(Protocol):
    """A server under load. `prepare` comes first, `close` last."""

    @property
    def info(self) -> TargetInfo: ...

    async def prepare(self) -> list[str]:
        """Find the model and what the server takes; notes about that. Raises PageferryError where none answers."""
        ...

    async def ask(self, question: Question, answer: Answer) -> float:
        """Read one answer to its end; the time of its last event. Raises RequestFailedError."""
        ...

    async def server_load(self) -> ServerLoad | None:
        """None where the server doesn't say."""
        ...

    async def close(self) -> None: ...
