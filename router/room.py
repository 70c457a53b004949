"""Whether a prompt and what is to follow it can ever fit into model, workers and a tenant's share."""

from dataclasses import dataclass

from pageferry.core.errors import FieldViolation, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Limits:
    """What model and workers can take at present; None where no worker of the role is there."""

    max_model_tokens: int
    prefill_pool_tokens: int | None
    decode_pool_tokens: int | None
    page_size: int = 16
    max_num_seqs: int | None = None  # of the decode worker with most slots
    decode_pages: int | None = None  # of the largest one's layers that keep all tokens

    def most_tokens(
        self, num_prompt: int, max_tokens: int | None, max_pages: int, num_kept: int, *, is_beam: bool
    ) -> int:
        """`max_tokens`, or where it is absent what fits; raises InvalidArgumentError where it can never fit."""
        wanted = max_tokens or 1
        if num_prompt + wanted > self.max_model_tokens:
            limit = f"the model takes {self.max_model_tokens} of prompt and answer together"
            raise _too_long(num_prompt, max_tokens, limit, "TOO_LONG")
        prefill_tokens, decode_tokens = self.prefill_pool_tokens, self.decode_pool_tokens
        if prefill_tokens is not None and num_prompt > prefill_tokens:
            raise _too_long(
                num_prompt, max_tokens, f"the largest prefill worker's pages hold {prefill_tokens}", "EXCEEDS_POOL"
            )
        # The last token's keys and values are never stored; and a single token needs no decode worker.
        stored = num_prompt + wanted - 1
        is_decoded = max_tokens != 1 or prefill_tokens is None or is_beam
        shared_pages = num_prompt // self.page_size
        if is_beam and decode_tokens is not None and self.decode_pages is not None:  # all beams are on one worker
            each_tokens = _pages_each(self.decode_pages, shared_pages, num_kept) * self.page_size
            decode_tokens = min(decode_tokens, each_tokens)
        if is_decoded and decode_tokens is not None and stored > decode_tokens:
            each = f" in each of {num_kept} beams" if is_beam else ""
            limit = f"the largest decode worker's pages hold {decode_tokens} of prompt and answer together{each}"
            raise _too_long(num_prompt, max_tokens, limit, "EXCEEDS_POOL")
        tenant_tokens = _pages_each(max_pages, shared_pages, num_kept) * self.page_size if max_pages else None
        if tenant_tokens is not None and stored > tenant_tokens:
            each = f" in each of {num_kept} answers" if num_kept > 1 else ""
            limit = f"the tenant's max_pages, {max_pages}, hold {tenant_tokens} of prompt and answer together{each}"
            raise _too_long(num_prompt, max_tokens, limit, "EXCEEDS_TENANT_PAGES")
        if max_tokens is not None:
            return max_tokens
        pools = [most + 1 for most in (decode_tokens, tenant_tokens) if most is not None]
        return min([self.max_model_tokens, *pools]) - num_prompt

    def num_pages(self, num_prompt: int, max_tokens: int, num_kept: int) -> int:
        """Of a pool that keeps all tokens: the prompt's full pages once, all others for each output that is kept."""
        shared = num_prompt // self.page_size
        return shared + num_kept * (-(-(num_prompt + max_tokens - 1) // self.page_size) - shared)


def _pages_each(num_pages: int, num_shared: int, num_kept: int) -> int:
    """Pages that each of several outputs may come to hold, where all have `num_shared` of them together."""
    return (num_pages + (num_kept - 1) * num_shared) // num_kept


def _too_long(num_prompt: int, max_tokens: int | None, limit: str, reason: str) -> InvalidArgumentError:
    counts = f"the prompt has {num_prompt} tokens"
    if max_tokens is not None:
        counts += f" and max_tokens is {max_tokens}, together {num_prompt + max_tokens}"
    message = f"{counts}; {limit}"
    return InvalidArgumentError(message, reason=reason, violations=(FieldViolation("stop.max_tokens", message),))
