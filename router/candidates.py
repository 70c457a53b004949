"""What a request needs, and workers as far as choosing among them goes: their loads, and what these predict."""

from dataclasses import dataclass

from pageferry.core.formats import PageFormat
from pageferry.core.layout import CacheLayout
from pageferry.core.profiles import is_accepted

DEFAULT_TOKENS_PER_S = 500.0  # of a prefill worker that has not measured its speed yet
_UNBOUNDED = 2**63


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs. `num_tokens` is prompt plus tokens that were generated before a retry."""

    num_tokens: int
    num_left: int  # most tokens still to generate
    local_only: bool = False  # no prefill worker can help any more
    priority: int = 0  # lower goes first
    near: str = ""  # address of the decode worker that holds the prompt for another answer to the request
    page_formats: tuple[PageFormat, ...] = ()  # those that its pages may have; none: any
    num_beams: int = 0  # of a beam search

    @property
    def num_slots(self) -> int:
        """Of a decode worker."""
        return max(1, self.num_beams)

    @property
    def is_one_token(self) -> bool:
        """Whether a prefill worker can do all of it."""
        return self.num_left == 1 and not self.num_beams

    def accepts(self, layout: CacheLayout) -> bool:
        """Whether its pages may be kept in that layout."""
        return is_accepted(layout.format, self.page_formats)

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values a decode worker may come to hold: those of the last one are never stored."""
        return self.num_tokens + self.num_left - 1


@dataclass(frozen=True, slots=True)
class PrefillState:
    """A usable prefill worker: its last load report and what was sent to it since."""

    address: str
    layout: CacheLayout
    num_waiting: int  # prompts that are no less urgent than this request, as are the tokens
    queued_tokens: int
    tokens_per_s: float  # 0: unknown
    chunk_tokens: int
    cached_tokens: int  # of this request's
    num_running: int = 0
    behind_tokens: int = 0  # of less urgent prompts: they give way at the next chunk
    refuses: bool = False  # it has no room until its next load report
    has_failed: bool = False  # a request, since it was started
    capacity_tokens: int = _UNBOUNDED  # of one prompt

    @property
    def is_untried(self) -> bool:
        """Whether it has measured nothing, has nothing to do, and has not failed at its first try."""
        return not (self.has_failed or self.tokens_per_s or self.queued_tokens or self.num_waiting or self.num_running)

    def fits(self, demand: Demand) -> bool:
        return demand.num_tokens <= self.capacity_tokens

    def ttft_s(self, demand: Demand) -> float:
        """Predicted seconds to the first token.

        The shortest goes first there, so that behind the step that runs, each other prompt counts for no more tokens
        than this one has. Of less urgent ones there is one chunk at most to wait for.
        """
        uncached = demand.num_tokens - self.cached_tokens
        ahead = min(self.queued_tokens, self.chunk_tokens + (self.num_waiting + self.num_running) * uncached)
        ahead += min(self.behind_tokens, self.chunk_tokens)
        return (ahead + uncached) / (self.tokens_per_s or DEFAULT_TOKENS_PER_S)

    def has_little_queued(self, demand: Demand) -> bool:
        """Whether one more only hides the way there: nothing waits, or two steps compute all of it."""
        uncached = demand.num_tokens - self.cached_tokens
        if self.refuses:
            return False
        return self.num_waiting == 0 or self.queued_tokens + uncached <= 2 * self.chunk_tokens


@dataclass(frozen=True, slots=True)
class DecodeState:
    """A usable decode worker: its last load report and what was sent to it since."""

    address: str
    layout: CacheLayout
    num_active: int  # sequences that hold a slot or wait for one
    max_num_seqs: int
    available_pages: tuple[int, ...]  # of each cache group, then of tails where there are such
    chunk_tokens: int  # most that it computes at once
    queued_tokens: int
    tokens_per_s: float  # of prompts; 0: unknown
    cached_tokens: int  # of this request's
    capacity_tokens: int = _UNBOUNDED  # of prompt and answer, as stored
    least_priority: int | None = None  # the largest number of what runs there; None: nothing's place can be taken

    def fits(self, demand: Demand) -> bool:
        return demand.num_stored <= self.capacity_tokens and demand.num_slots <= self.max_num_seqs

    def needed_pages(self, demand: Demand, headroom_pages: int) -> tuple[int, ...]:
        """Of each pool, in the order of `available_pages`."""
        page_size = self.layout.page_size
        # A window is promised all that it can come to hold, of which cached pages spare it none.
        of_prompt, at_most = self.layout.num_pages(demand.num_tokens), self.layout.num_pages(demand.num_stored)
        of_full = min(of_prompt + headroom_pages, at_most) - self.cached_tokens // page_size
        groups = [
            of_full
            if group.window is None
            else demand.num_slots * group.most_live(demand.num_stored, self.chunk_tokens, page_size)
            for group in self.layout.groups
        ]
        return (*groups, 1) if self.layout.format.has_tails else tuple(groups)

    def has_room(self, demand: Demand, headroom_pages: int) -> bool:
        pools = zip(self.needed_pages(demand, headroom_pages), self.available_pages, strict=True)
        has_slots = self.num_active + demand.num_slots <= self.max_num_seqs
        return has_slots and all(needed <= available for needed, available in pools)

    def may_make_room(self, demand: Demand) -> bool:
        """Whether something less urgent runs there, whose slot and pages the worker may take for the request."""
        return self.least_priority is not None and self.least_priority > demand.priority

    def load_score(self, demand: Demand, headroom_pages: int) -> float:
        """Share of the free pages of the scarcest pool plus share of the slots in use; lower is better."""
        needed, available = self.scarcest_pages(demand, headroom_pages)
        return needed / max(1, available) + self.num_active / max(1, self.max_num_seqs)

    def scarcest_pages(self, demand: Demand, headroom_pages: int) -> tuple[int, int]:
        """Needed and available pages of the pool of which the request would take the greatest share."""
        pools = zip(self.needed_pages(demand, headroom_pages), self.available_pages, strict=True)
        return max(pools, key=lambda pool: pool[0] / max(1, pool[1]))

    def ttft_s(self, demand: Demand) -> float | None:
        """Predicted seconds to the first token if it computes the prompt; None while its speed is unknown."""
        if not self.tokens_per_s:
            return None
        return (self.queued_tokens + demand.num_tokens - self.cached_tokens) / self.tokens_per_s
