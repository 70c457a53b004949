"""The loads, as options of `pageferry bench`, and what of each is compared with which target."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a result's summary by its path, and the target for Pageferry divided by the other."""

    path: str
    title: str
    better: Literal["lower", "higher"]
    limit: float | None = None  # against the best peer; None: only shown
    own_load: str = ""  # a load whose same figure of the same system it is compared with, too
    own_limit: float | None = None


TTFT = Metric("ttft_ms.p50", "first token p50, ms", "lower")
TPOT = Metric("tpot_ms.p50", "a token p50, ms", "lower")
GAP = Metric("itl_ms.p99", "gap p99, ms", "lower")
RATE = Metric("output_tokens_per_s", "tokens/s", "higher")


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    title: str
    options: tuple[str, ...]  # of the client whose figures count
    streams: int  # requests at once, those of the background among them
    max_tokens: int  # of the longest request
    metrics: tuple[Metric, ...]
    background: tuple[str, ...] = ()  # options of a second client, which is interrupted when the first has ended


def _lengths(prompt: int, answer: int) -> tuple[str, ...]:
    return ("--input-tokens", str(prompt), "--output-tokens", str(answer))


def _closed(streams: int, requests: int, prompt: int, answer: int) -> tuple[str, ...]:
    numbers = ("--concurrency", str(streams), "--requests", str(requests), "--warmup", str(streams))
    return (*numbers, *_lengths(prompt, answer))


def _shared(streams: int, requests: int, answer: int) -> tuple[str, ...]:
    return (*_closed(streams, requests, 1030, answer), "--prefix-tokens", "1000", "--prefixes", "1")


def loads(*, quick: bool = False) -> dict[str, Load]:
    """All, by name; `quick` ones show that everything runs, and their figures mean nothing."""
    answer, each, seconds, shared = (16, 1, 6, 4) if quick else (128, 4, 30, 16)
    answer_of_4 = 32 if quick else 256
    four = ("--concurrency", "4", "--duration", f"{seconds}s", "--warmup", "4", *_lengths(128, answer_of_4))
    arriving = ("--rate", "0.25", "--arrivals", "constant", "--duration", "10m", *_lengths(1500, 16))
    last_token = 128 + answer
    all_loads = (
        Load(
            "single",
            "One stream, 128 tokens in, 128 out",
            _closed(1, 2 if quick else 8, 128, answer),
            1,
            last_token,
            (replace(TPOT, limit=0.8), replace(TTFT, limit=1.0), RATE),
        ),
        *(
            Load(
                f"streams-{streams}",
                f"{streams} streams, 128 tokens in, 128 out, every prompt another",
                _closed(streams, each * streams, 128, answer),
                streams,
                last_token,
                (replace(RATE, limit=1.3), TTFT, TPOT, GAP),
            )
            for streams in (8, 32)
        ),
        Load(
            "steady",
            "4 streams, 128 tokens in, 256 out, alone",
            four,
            4,
            128 + answer_of_4,
            (GAP, TPOT, RATE),
        ),
        Load(
            "interference",
            "The same 4 streams, while a prompt of 1,500 tokens comes every 4 s; figures are the 4 streams'",
            four,
            5,
            1516,
            (replace(GAP, limit=0.2, own_load="steady", own_limit=1.5), TPOT, RATE),
            arriving,
        ),
        Load(
            "prefix",
            "Requests that share a warm prefix of 1,000 tokens and differ in 30, one after the other, 16 out",
            _shared(1, shared, 16),
            1,
            1046,
            (replace(TTFT, limit=1.0), TPOT),
        ),
        Load(
            "prefix-16",
            "The same, all at once",
            _shared(shared, shared, 16),
            shared,
            1046,
            (replace(TTFT, limit=1.0), RATE),
        ),
    )
    return {load.name: load for load in all_loads}
