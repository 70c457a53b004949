"""What a model can take of a request at all."""

from dataclasses import dataclass

from pageferry.core.beam import check_beam
from pageferry.core.errors import FieldViolation, InvalidArgumentError, invalid
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import WorkItem

MAX_PROMPT_LOGPROBS = 150_000  # of a request; a dozen bytes each in a message


@dataclass(frozen=True, slots=True)
class ModelLimits:
    vocab_size: int
    max_model_tokens: int  # of prompt and output together

    def check(self, work: WorkItem) -> None:
        """Raise InvalidArgumentError naming the field, the value and the limit."""
        for field, ids in (("prompt_ids", work.prompt_ids), ("output_ids", work.output_ids)):
            self._check_ids(field, ids)
        self._check_ids("stop_token_ids", tuple(work.stop.stop_token_ids))
        self.check_sampling(work.sampling)
        self.check_prompt_logprobs(work.sampling, len(work.prompt_ids))
        if len(work.output_ids) >= work.stop.max_tokens:
            limit = f"leave nothing of max_tokens, {work.stop.max_tokens}"
            raise invalid("output_ids", f"{len(work.output_ids)} tokens", limit)
        if work.beam is not None:
            check_beam(work.sampling, work.stop, len(work.output_ids))
        self.check_length(len(work.prompt_ids), work.stop.max_tokens)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise InvalidArgumentError for a bias or a ban of what is no token id."""
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias))
        for index, ids in enumerate(sampling.banned):
            self._check_ids(f"banned[{index}]", ids)

    def check_prompt_logprobs(self, sampling: SamplingParams, num_prompt: int) -> None:
        """Raise InvalidArgumentError where there would be more than a message can hold."""
        num_each = sampling.num_prompt_logprobs
        if num_each is not None and num_prompt * (1 + num_each) > MAX_PROMPT_LOGPROBS:
            limit = f"must be so few that {num_prompt} tokens have at most {MAX_PROMPT_LOGPROBS}, their own among them"
            raise invalid("prompt_logprobs", num_each, limit)

    def check_length(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt + max_tokens <= self.max_model_tokens:
            return
        counts = f"prompt of {num_prompt} tokens and max_tokens {max_tokens} are {num_prompt + max_tokens} tokens"
        message = f"{counts}, the model takes {self.max_model_tokens} together"
        field = "prompt_ids" if num_prompt >= self.max_model_tokens else "max_tokens"
        raise InvalidArgumentError(message, reason="TOO_LONG", violations=(FieldViolation(field, message),))

    def _check_ids(self, field: str, ids: tuple[int, ...]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(id_ for id_ in ids if not 0 <= id_ < self.vocab_size)
            raise invalid(field, wrong, f"must be a token id from 0 to {self.vocab_size - 1}")
