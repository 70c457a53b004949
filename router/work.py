"""What is left to do of one answer, for the choice of workers and for the workers."""

from collections.abc import Sequence
from dataclasses import replace

from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import WorkItem
from pageferry.router.admission import Admitted
from pageferry.router.ask import Ask
from pageferry.router.candidates import Demand


def demand_of(admitted: Admitted, num_output: int, *, local_only: bool, near: str) -> Demand:
    """After `num_output` tokens; the rest is as `Demand` has it."""
    return Demand(
        num_tokens=len(admitted.prompt_ids) + num_output,
        num_left=admitted.stop.max_tokens - num_output,
        local_only=local_only,
        priority=admitted.priority,
        near=near,
        page_formats=admitted.profile.profile.formats,
        num_beams=0 if admitted.beam is None else admitted.beam.width,
    )


def ask_of(admitted: Admitted, demand: Demand, deadline: float | None) -> Ask:
    """What it asks of the workers before anything is generated."""
    return Ask(
        list(admitted.prompt_ids),
        demand,
        priority=admitted.priority,
        profile=admitted.profile,
        deadline=deadline,
        cache_salt=admitted.cache_salt,
    )


def work_of(admitted: Admitted, output_ids: Sequence[int], *, choice: int, num_tries: int) -> WorkItem:
    """After those tokens, for the last of so many tries."""
    # A worker may still be ending the try before, under the id that it had.
    retry = f".{num_tries}" if num_tries > 1 else ""
    number = f"/{choice}" if choice else ""
    return WorkItem(
        request_id=admitted.work_id + number + retry,
        prompt_ids=admitted.prompt_ids,
        output_ids=tuple(output_ids),
        sampling=_sampling(admitted.sampling, is_first=not (choice or output_ids)),
        stop=admitted.stop,
        choice=choice,
        priority=admitted.priority,
        cache_salt=admitted.cache_salt,
        speculate=admitted.profile.profile.speculation,
        profile=admitted.profile.name,
        beam=admitted.beam,
    )


def _sampling(sampling: SamplingParams, *, is_first: bool) -> SamplingParams:
    """Log-probabilities of the prompt are told once, with the first token of the first answer."""
    if sampling.num_prompt_logprobs is None or is_first:
        return sampling
    return replace(sampling, num_prompt_logprobs=None)
