"""Workers as the policy sees them: their last load report, and what was sent to them since."""

from collections.abc import Sequence

from pageferry.router.admission import Limits
from pageferry.router.candidates import DecodeState, PrefillState
from pageferry.router.fleet import Fleet
from pageferry.router.workers import Role, Worker

_PAGE_SIZE = 16  # while no worker has been seen


def prefill_state(worker: Worker, cached_tokens: int) -> PrefillState:
    view = worker.view
    assert view.layout is not None and view.snapshot is not None, "a ready worker has been seen"
    return PrefillState(
        address=worker.address,
        layout=view.layout,
        num_waiting=view.load.waiting + len(view.uncounted),
        queued_tokens=view.load.queued_prompt_tokens + sum(work.num_tokens for work in view.uncounted),
        tokens_per_s=view.load.prefill_tokens_per_s,
        chunk_tokens=view.snapshot.chunk_tokens,
        cached_tokens=cached_tokens,
        num_running=view.load.running,
        refuses=view.refusing,
        has_failed=view.has_failed,
        capacity_tokens=view.capacity_tokens(),
    )


def decode_state(worker: Worker, cached_tokens: int) -> DecodeState:
    view, load = worker.view, worker.view.load
    assert view.layout is not None and view.snapshot is not None, "a ready worker has been seen"
    return DecodeState(
        address=worker.address,
        layout=view.layout,
        num_active=load.running + load.waiting + load.tickets + len(view.uncounted),
        max_num_seqs=view.snapshot.max_num_seqs,
        available_pages=view.available_pages,
        chunk_tokens=view.snapshot.chunk_tokens,
        queued_tokens=load.queued_prompt_tokens + sum(work.num_tokens for work in view.uncounted),
        tokens_per_s=load.prefill_tokens_per_s,
        cached_tokens=cached_tokens,
        capacity_tokens=view.capacity_tokens(),
        least_priority=load.least_priority if load.HasField("least_priority") else None,
    )


def capacity_tokens(workers: Sequence[Worker]) -> int | None:
    """Tokens that the pools of the largest of the workers hold; None without a worker."""
    return max((worker.view.capacity_tokens() for worker in workers), default=None)


def may_hold(worker: Worker, num_tokens: int) -> bool:
    """Whether its pools can ever hold a sequence of so many tokens, as far as is known of it."""
    return worker.view.layout is None or num_tokens <= worker.view.capacity_tokens()


def limits_of(fleet: Fleet, own_limit: int) -> Limits:
    """What a request may ask for at present; `own_limit` is that of the model here."""
    prefills, decodes = fleet.ready(Role.PREFILL), fleet.ready(Role.DECODE)
    told = [worker.view.snapshot.max_model_tokens for worker in decodes if worker.view.snapshot is not None]
    page_sizes = [worker.view.layout.page_size for worker in decodes if worker.view.layout is not None]
    return Limits(
        min(own_limit, max(told, default=own_limit)),
        capacity_tokens(prefills),
        capacity_tokens(decodes),
        min(page_sizes, default=_PAGE_SIZE),
    )
