"""Whether a request can be served at all, and what it then asks of the workers: checked before any work is done."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pageferry.core.beam import check_beam
from pageferry.core.config import RouterConfig
from pageferry.core.errors import (
    FieldViolation,
    NotFoundError,
    PermissionDeniedError,
    invalid,
)
from pageferry.core.limits import ModelLimits
from pageferry.core.sampling import BeamParams, SamplingParams, StopParams
from pageferry.core.tenants import ANYBODY, Tenant
from pageferry.router.beam import beam_of
from pageferry.router.profiles import DEFAULT, Chosen, Profiles
from pageferry.router.prompts import Prompts, check_ids
from pageferry.router.room import Limits
from pageferry.runtime.convert_work import sampling_from_proto
from pageferry.text import bad_words
from pageferry.text.grammar import Grammars
from pageferry.text.tokenizer import Tokenizer
from pageferry.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from pageferry.v1.types_pb2 import StopConditions

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
MAX_CHOICES = 16
MAX_REQUEST_ID_CHARACTERS = 128
MAX_MODEL_CHARACTERS = 128  # of a name that is not known, in the message that says so


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is well formed and can fit."""

    request_id: str
    work_id: str  # by which workers know it
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    stop_strings: tuple[str, ...]
    skip_special: bool
    priority: int
    cache_salt: str
    num_pages: int  # of a pool that keeps all its tokens, once it has all that it asks for
    tokenize_s: float
    n: int = 1  # answers that are sent
    num_choices: int = 1  # answers that are generated
    wants_logprobs: bool = False
    echo: bool = False
    profile: Chosen = DEFAULT
    beam: BeamParams | None = None

    @property
    def is_ranked(self) -> bool:
        """Whether answers are compared, and the likeliest sent once all are complete."""
        return self.num_choices > self.n


class Admission:
    """Checks requests against one model; `limits` is asked anew for each."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        config: RouterConfig,
        limits: Callable[[], Limits],
        defaults: Mapping[str, float],
        profiles: Profiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`defaults` are the model's own for sampling fields that a request leaves out."""
        self.model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._prompts = Prompts(tokenizer, vocab_size, config)
        self._grammars = Grammars(lambda: tokenizer, vocab_size)
        self._limits = limits
        self._defaults = defaults
        self._profiles = profiles or Profiles()
        self._clock = clock

    async def admit(self, request: GenerateRequest, tenant: Tenant = ANYBODY, cache_salt: str = "") -> Admitted:
        """Raises the error of the first thing that is wrong, or that the tenant may not do."""
        self.check_model(request.model)
        _check_priority(request.priority, tenant)
        profile = self._profiles.choose(request.profile, tenant)
        limits = self._limits()
        beam = beam_of(request, limits.max_num_seqs)
        n, num_choices = _num_choices(request)
        num_kept = num_choices if beam is None else beam.width  # outputs that take pages of their own
        self._check_fields(request)
        sampling = await self._sampling(request, self._of_model(limits))
        began = self._clock()
        prompt_ids = await self._prompts.of_generate(request)
        tokenize_s = self._clock() - began
        limits = self._limits()  # workers may have come or gone meanwhile
        self._of_model(limits).check_prompt_logprobs(sampling, len(prompt_ids))
        request_id = request.request_id or secrets.token_hex(8)
        max_tokens = request.stop.max_tokens if request.stop.HasField("max_tokens") else None
        most = limits.most_tokens(len(prompt_ids), max_tokens, tenant.max_pages, num_kept, is_beam=beam is not None)
        stop = self._stop(request.stop, most)
        if beam is not None:
            check_beam(sampling, stop)
        return Admitted(
            request_id=request_id,
            work_id=request_id if tenant is ANYBODY else f"{tenant.name}/{request_id}",
            prompt_ids=prompt_ids,
            sampling=replace(sampling, num_logprobs=sampling.num_logprobs or 0) if num_choices > n else sampling,
            stop=stop,
            stop_strings=tuple(request.stop_strings),
            skip_special=not request.HasField("skip_special_tokens") or request.skip_special_tokens,
            priority=profile.profile.priority_of(request.priority),
            cache_salt=cache_salt,
            num_pages=limits.num_pages(len(prompt_ids), stop.max_tokens, num_kept),
            tokenize_s=tokenize_s,
            n=n,
            num_choices=num_choices,
            wants_logprobs=sampling.num_logprobs is not None,
            echo=request.echo,
            profile=profile,
            beam=beam,
        )

    def _check_fields(self, request: GenerateRequest) -> None:
        """Those that need no more than a look."""
        if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
            length = f"{len(request.request_id)} characters"
            raise invalid("request_id", length, f"must have at most {MAX_REQUEST_ID_CHARACTERS}")
        if request.echo and request.HasField("chat"):
            raise invalid("echo", True, "must not be set with chat, whose text is the template's")
        check_ids("stop.stop_token_ids", request.stop.stop_token_ids, self._vocab_size)
        _check_stop_strings(request.stop_strings)
        _check_counts(request.stop)

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Ids of the text, or of the rendered conversation; the same as `admit` would use."""
        self.check_model(request.model)
        return await self._prompts.of_tokenize(request)

    def check_model(self, name: str) -> None:
        if name not in ("", self.model):
            raise NotFoundError(
                f"model {name[:MAX_MODEL_CHARACTERS]!r} is not served, but {self.model!r} is", reason="MODEL_NOT_FOUND"
            )

    def _of_model(self, limits: Limits) -> ModelLimits:
        return ModelLimits(self._vocab_size, limits.max_model_tokens)

    async def _sampling(self, request: GenerateRequest, limits: ModelLimits) -> SamplingParams:
        sampling = sampling_from_proto(request.sampling, {"seed": secrets.randbits(64), **self._defaults})
        limits.check_sampling(sampling)
        bad_words.check(request.bad_words)
        if sampling.grammar is not None:
            if request.HasField("beam"):
                raise invalid("beam", f"width {request.beam.width}", "can't be combined with a grammar")
            if request.stop.ignore_eos:
                raise invalid("stop.ignore_eos", True, "can't be combined with a grammar, which ends with that token")
            await self._grammars.check(sampling.grammar)
        if request.bad_words:
            banned = await asyncio.to_thread(bad_words.token_sequences, request.bad_words, self._tokenizer)
            sampling = replace(sampling, banned=(*sampling.banned, *banned))
        return sampling

    def _stop(self, stop: StopConditions, most: int) -> StopParams:
        stop_token_ids = frozenset(stop.stop_token_ids)
        if not stop.ignore_eos:
            stop_token_ids |= frozenset(self._tokenizer.eos_ids)
        return StopParams(most, stop.min_tokens, stop_token_ids, stop.max_repeats)


def _check_stop_strings(stop_strings: Sequence[str]) -> None:
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise invalid("stop_strings", f"{len(stop_strings)} strings", f"must be at most {MAX_STOP_STRINGS}")
    if "" in stop_strings:
        raise invalid(f"stop_strings[{list(stop_strings).index('')}]", "", "must not be empty")
    for index, text in enumerate(stop_strings):
        if len(text) > MAX_STOP_CHARACTERS:
            length = f"{len(text)} characters"
            raise invalid(f"stop_strings[{index}]", length, f"must have at most {MAX_STOP_CHARACTERS}")


def _num_choices(request: GenerateRequest) -> tuple[int, int]:
    """How many answers are sent, and how many generated."""
    n = request.n or 1
    for name, number in (("n", n), ("best_of", request.best_of)):
        if number > MAX_CHOICES:
            raise invalid(name, number, f"must be at most {MAX_CHOICES}")
    if request.best_of and n > request.best_of:
        raise invalid("n", n, f"must be at most best_of, {request.best_of}")
    return n, 1 if request.HasField("beam") else request.best_of or n


def _check_priority(priority: int, tenant: Tenant) -> None:
    if priority < tenant.min_priority:
        description = f"is {priority}, the least that tenant {tenant.name} may set is {tenant.min_priority}"
        violations = (FieldViolation("priority", description),)
        raise PermissionDeniedError(f"priority {description}", reason="PRIORITY_DENIED", violations=violations)


def _check_counts(stop: StopConditions) -> None:
    """What is wrong with the numbers themselves, before it is known how long the prompt is."""
    most = stop.max_tokens if stop.HasField("max_tokens") else max(1, stop.min_tokens)
    StopParams(most, stop.min_tokens, frozenset(stop.stop_token_ids), stop.max_repeats)
