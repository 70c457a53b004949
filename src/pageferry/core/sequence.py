"""One request's state on a worker."""

from array import array
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

from pageferry.core.bans import Bans
from pageferry.core.constraint import Constraint
from pageferry.core.pool import PageId
from pageferry.core.repetition import RepetitionGuard
from pageferry.core.sampling import BeamParams, SamplingParams, StopParams
from pageferry.core.token_counts import TokenCounts

if TYPE_CHECKING:
    from pageferry.core.plan import SampledToken
    from pageferry.core.speculation import Drafting

NO_PAGE = PageId(-1)
PageTable = MutableSequence[PageId]  # what `page_table` makes


def page_table(pages: Iterable[PageId]) -> PageTable:
    """An array of 32-bit numbers: a batch takes it as it lies in memory, however long it is."""
    return cast(PageTable, array("i", pages))


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"


class SequenceStatus(Enum):
    WAITING = auto()  # for room, then for its first chunk
    RECEIVING = auto()  # pages are reserved and come from a prefill worker
    RUNNING = auto()
    FINISHED = auto()  # or aborted; holds no pages


@dataclass(frozen=True, slots=True)
class WorkItem:
    """What a worker is asked to compute: checked, immutable, the same for a retry but for `output_ids`."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    output_ids: tuple[int, ...] = ()  # already emitted: forced, never emitted again
    choice: int = 0
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    speculate: bool = False  # whether a step may compute several tokens
    beam: BeamParams | None = None
    profile: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """The one mutable object of a request, changed only by its scheduler, on the engine's thread.

    `token_ids` is prompt plus output. Position p's keys and values are computed once `num_computed > p`, and lie in
    page `tables[group][p // page_size]`, or where the format has tails and that page isn't full, in `tail`. Tables of
    window groups end with the last page taken, and pages behind the window are NO_PAGE. A sequence that is ready to
    decode has `num_computed == len(token_ids) - 1`.

    A beam search's has `beams` once its prompt is computed: they hold all pages then, and are stepped in its place.
    """

    work: WorkItem
    arrival: float  # seconds, the worker's clock
    deadline: float | None = None
    token_ids: list[int] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)  # of each cache group
    tail: PageId | None = None  # the same in each group's pool of tails
    page_hashes: list[bytes] = field(default_factory=list)  # of full pages of `token_ids`, as far as known
    num_computed: int = 0
    num_draft_computed: int = 0  # tokens whose keys and values a draft model has computed
    num_cached: int = 0  # prompt tokens first found in the prefix cache
    status: SequenceStatus = SequenceStatus.WAITING
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0  # of those; each has saved a step
    drafting: "Drafting | None" = None  # what its scheduler knows of its drafts
    first_scheduled: float | None = None
    first_token_time: float | None = None
    constraint: Constraint | None = None  # where the work has a grammar
    prompt_logprobs: "list[SampledToken] | None" = None  # of its prompt's tokens but the first, where they are wanted
    root: "Sequence | None" = None  # whose beam it is
    beams: "list[Sequence]" = field(default_factory=list)  # best first
    _counts: TokenCounts | None = None  # once they have been asked for
    _bans: Bans | None = None
    _guard: RepetitionGuard | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = [*self.work.prompt_ids, *self.work.output_ids]
        self.tables = [page_table(pages) for pages in self.tables]

    @property
    def owner(self) -> "Sequence":
        """The request's own: itself, unless it is a beam."""
        return self.root or self

    @property
    def members(self) -> "list[Sequence]":
        """Those that are stepped for it."""
        return self.beams or [self]

    @property
    def num_slots(self) -> int:
        """How many of the sequences that run at once it counts for."""
        return 1 if self.work.beam is None else self.work.beam.width

    @property
    def num_prompt(self) -> int:
        return len(self.work.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated, the forced ones included; also the position of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_remaining(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def token_counts(self) -> TokenCounts:
        """Of all its tokens."""
        if self._counts is None:
            self._counts = TokenCounts()
        self._counts.count(self.token_ids, self.num_prompt)
        return self._counts

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of them are still to compute, so that its prompt can't be taken from a cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def bans(self) -> Bans:
        """Of its work."""
        if self._bans is None:
            self._bans = Bans(self.work.sampling.banned)
        return self._bans

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token ends it.

        `min_tokens` wins over stop ids until it is reached, but not over a grammar that lets nothing else follow.
        """
        if self.num_output == 0:
            return None
        stop = self.work.stop
        may_stop = self.num_output >= stop.min_tokens or self.work.sampling.grammar is not None
        if may_stop and self.token_ids[-1] in stop.stop_token_ids:
            return FinishReason.STOP
        if stop.max_repeats and self._is_repeating():
            return FinishReason.REPETITION
        return FinishReason.LENGTH if self.num_output >= stop.max_tokens else None

    def _is_repeating(self) -> bool:
        if self._guard is None:
            self._guard = RepetitionGuard()
        return self._guard.repeats(self.token_ids, self.num_prompt, self.work.stop.max_repeats)
