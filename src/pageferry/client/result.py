"""What a client is told: pieces of the output, and the whole with its figures."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token; `logprob` and `top` (likeliest first) only where `logprobs` was asked for."""

    position: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """More of the output. `text` is final, and empty while a stop string or a character is incomplete.

    `choice` is the number of the answer, where several are asked for. `prompt` is in the first delta, where
    `prompt_logprobs` were asked for: the prompt's tokens but the first, at their positions in the prompt.
    """

    text: str
    tokens: tuple[Token, ...]
    choice: int = 0
    prompt: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `score` is what answers were compared by, with `best_of` or `beam_width`."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str  # "stop", "length" or "repetition"
    matched_stop: str
    score: float | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached_tokens` of the prompt's were not computed, since their pages were found in a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pages:
    """What was handed from prefill to decode; `format` is None where nothing was.

    `hidden` is the share of the transfer that went on behind compute.
    """

    format: str | None
    shipped: int
    cached: int
    bytes: int
    hidden: float


@dataclass(frozen=True, slots=True)
class Result:
    """All answers, with the first or only one's text and the like at hand.

    `timings_ms` has the contract's Timings, without `_ms` in their names. `prompt` is as in Delta.
    """

    request_id: str
    trace_id: str
    model: str
    choices: tuple[Choice, ...]
    prompt: tuple[Token, ...]
    usage: Usage  # of all answers together
    timings_ms: dict[str, float]
    pages: Pages

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.choices[0].tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str:
        return self.choices[0].matched_stop
