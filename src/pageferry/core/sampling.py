"""How a token is drawn and when a generation ends."""

import sys
from dataclasses import dataclass

from pageferry.core.errors import invalid

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked sampling parameters; `seed` is always set, so that a draw depends on (seed, position, choice) alone."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None  # None: none; 0: the sampled token's only

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= sys.float_info.max:
            raise invalid("temperature", self.temperature, "must be 0 or finite and positive")
        if not 0 <= self.top_k < 2**32:
            raise invalid("top_k", self.top_k, "must be 0 (off) or positive, and below 2**32")
        if not 0 < self.top_p <= 1:
            raise invalid("top_p", self.top_p, "must be above 0 and at most 1")
        if not 0 <= self.min_p < 1:
            raise invalid("min_p", self.min_p, "must be at least 0 and below 1")
        if not 0 < self.repetition_penalty <= sys.float_info.max:
            raise invalid("repetition_penalty", self.repetition_penalty, "must be finite and positive")
        for name, value in (("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)):
            if not -2 <= value <= 2:
                raise invalid(name, value, "must be from -2 to 2")
        if not 0 <= self.seed < 2**64:
            raise invalid("seed", self.seed, "must be from 0 to 2**64 - 1")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise invalid("logprobs", self.num_logprobs, f"must be from 0 to {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a generation ends; `stop_token_ids` holds the model's end-of-sequence ids too unless they are ignored."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise invalid("max_tokens", self.max_tokens, "must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise invalid("min_tokens", self.min_tokens, f"must be from 0 to max_tokens, {self.max_tokens}")
