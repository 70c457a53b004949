"""Workers as the policy sees them: their last load report, and what was sent to them since."""

from collections.abc import Iterable, Sequence

from pageferry.router.ask import Ask
from pageferry.router.candidates import DecodeState, PrefillState
from pageferry.router.fleet import Fleet
from pageferry.router.room import Limits
from pageferry.router.workers import Role, Worker
from pageferry.v1.inference_pb2 import PriorityLoad, WorkerLoad

_PAGE_SIZE = 16  # while no worker has been seen


def prefill_state(worker: Worker, cached_tokens: int, priority: int) -> PrefillState:
    """As it is for a request of that priority, to which prompts that are less urgent give way at the next chunk."""
    view = worker.view
    assert view.layout is not None and view.snapshot is not None, "a ready worker has been seen"
    loads: Sequence[PriorityLoad | WorkerLoad] = [entry for entry in view.load.priorities if entry.priority <= priority]
    if not view.load.priorities:  # nothing is there, or the worker doesn't say
        loads = [view.load]
    sent = [work for work in view.uncounted if work.priority <= priority]
    behind = [entry.queued_prompt_tokens for entry in view.load.priorities if entry.priority > priority]
    return PrefillState(
        address=worker.address,
        layout=view.layout,
        num_waiting=sum(load.waiting for load in loads) + len(sent),
        queued_tokens=sum(load.queued_prompt_tokens for load in loads) + sum(work.num_tokens for work in sent),
        behind_tokens=sum(behind) + sum(work.num_tokens for work in view.uncounted if work.priority > priority),
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
        num_active=num_active(worker),
        max_num_seqs=num_slots(worker),
        available_pages=view.available_pages,
        chunk_tokens=view.snapshot.chunk_tokens,
        queued_tokens=load.queued_prompt_tokens + sum(work.num_tokens for work in view.uncounted),
        tokens_per_s=load.prefill_tokens_per_s,
        cached_tokens=cached_tokens,
        capacity_tokens=view.capacity_tokens(),
        least_priority=load.least_priority if load.HasField("least_priority") else None,
    )


def decode_states(ask: Ask, workers: Iterable[Worker]) -> list[DecodeState]:
    return [decode_state(worker, ask.cached_tokens(worker)) for worker in workers]


def num_active(worker: Worker) -> int:
    """Sequences that hold a slot of a decode worker or wait for one."""
    load = worker.view.load
    return load.running + load.waiting + load.tickets + len(worker.view.uncounted)


def num_slots(worker: Worker) -> int:
    return worker.view.snapshot.max_num_seqs if worker.view.snapshot is not None else 0


def num_free_slots(worker: Worker) -> int:
    return max(0, num_slots(worker) - num_active(worker))


def capacity_tokens(workers: Sequence[Worker]) -> int | None:
    """Tokens that the pools of the largest of the workers hold; None without a worker."""
    return max((worker.view.capacity_tokens() for worker in workers), default=None)


def may_hold(worker: Worker, num_tokens: int) -> bool:
    """Whether its pools can ever hold a sequence of so many tokens, as far as is known of it."""
    return worker.view.layout is None or num_tokens <= worker.view.capacity_tokens()


def limits_of(fleet: Fleet, own_limit: int) -> Limits:
    """What a request may ask for at present; `own_limit` is that of the model here."""
    prefills, decodes = fleet.ready(Role.PREFILL), fleet.ready(Role.DECODE)
    told = [snapshot for worker in decodes if (snapshot := worker.view.snapshot) is not None]
    page_sizes = [worker.view.layout.page_size for worker in decodes if worker.view.layout is not None]
    pages = [most for worker in decodes if (most := worker.view.full_pages()) is not None]
    return Limits(
        min(own_limit, max((one.max_model_tokens for one in told), default=own_limit)),
        capacity_tokens(prefills),
        capacity_tokens(decodes),
        min(page_sizes, default=_PAGE_SIZE),
        max_num_seqs=max((one.max_num_seqs for one in told), default=None),
        decode_pages=max(pages, default=None),
    )
