"""How a token is drawn and when a generation ends."""

import sys
from dataclasses import dataclass
from enum import Enum

from pageferry.core.errors import invalid

MAX_LOGPROBS = 20
MAX_BIASED = 1024  # token ids of one request
MAX_BIAS = 100.0
MAX_BANNED = 1024  # token sequences of one request
MAX_BANNED_TOKENS = 16_384  # of all of them
MAX_STOP_TOKENS = 1024  # different ids of one request
MAX_BEAMS = 16
MAX_LENGTH_PENALTY = 32  # the power of any length that it gives is a finite double
MAX_REPEATS = 1000
MAX_REPEATED_TOKENS = 64  # of a run that `max_repeats` counts


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any; the text is empty
    REGEX = "regex"
    LARK = "lark"
    CHOICES = "choices"  # a JSON list of texts


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match, whole."""

    kind: GrammarKind
    text: str


class EarlyStopping(Enum):
    HEURISTIC = "heuristic"
    FIRST = "first"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How a beam search chooses; as transformers' `num_beams`, `length_penalty` and `early_stopping`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAMS:
            raise invalid("beam.width", self.width, f"must be from 1 to {MAX_BEAMS}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            limit = f"must be from {-MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}"
            raise invalid("beam.length_penalty", self.length_penalty, limit)


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
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id
    banned: tuple[tuple[int, ...], ...] = ()  # token ids that must not come in this order
    grammar: Grammar | None = None

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
        for name, num in (("logprobs", self.num_logprobs), ("prompt_logprobs", self.num_prompt_logprobs)):
            if num is not None and not 0 <= num <= MAX_LOGPROBS:
                raise invalid(name, num, f"must be from 0 to {MAX_LOGPROBS}")
        self._check_bias()

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED:
            raise invalid("logit_bias", f"{len(self.logit_bias)} token ids", f"must be at most {MAX_BIASED}")
        for token_id, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise invalid(f"logit_bias[{token_id}]", bias, f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if len(self.banned) > MAX_BANNED:
            raise invalid("banned", f"{len(self.banned)} token sequences", f"must be at most {MAX_BANNED}")
        if () in self.banned:
            raise invalid("banned", [], "must hold at least one token id each")
        if (num_tokens := sum(map(len, self.banned))) > MAX_BANNED_TOKENS:
            raise invalid("banned", f"{num_tokens} token ids", f"must be at most {MAX_BANNED_TOKENS} in all sequences")

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
    max_repeats: int = 0  # of a run of tokens at the end; 0 is off

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise invalid("max_tokens", self.max_tokens, "must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise invalid("min_tokens", self.min_tokens, f"must be from 0 to max_tokens, {self.max_tokens}")
        if (num_ids := len(self.stop_token_ids)) > MAX_STOP_TOKENS:
            raise invalid("stop_token_ids", f"{num_ids} token ids", f"must be at most {MAX_STOP_TOKENS}")
        if not (self.max_repeats == 0 or 2 <= self.max_repeats <= MAX_REPEATS):
            raise invalid("max_repeats", self.max_repeats, f"must be 0 (off) or from 2 to {MAX_REPEATS}")
