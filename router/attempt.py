"""One try at a request on the workers that it was routed to: their calls, and their tokens as one stream.

Tokens come from the prefill worker (the first) and the decode worker (the same one again, then all others). Whatever
is over, is over at both workers: closing the stream of tokens ends both calls.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager

from pageferry.core.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    PageferryError,
    ResourceExhaustedError,
    UnavailableError,
)
from pageferry.router.dispatch import Grant
from pageferry.router.merged_calls import Item, MergedCalls
from pageferry.router.policy import Source
from pageferry.router.timings import Timeline
from pageferry.router.workers import Role, Worker
from pageferry.v1 import decode_pb2, prefill_pb2
from pageferry.v1.types_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    GeneratedToken,
    WorkItem,
)

# How long the other worker's word is waited for, once one of them has failed: the prefill worker knows why a hand-off
# broke, and the decode worker may have had its commit before the prefill worker died.
CAUSE_S = 0.2
COMMIT_S = 0.5
# How long the hand-off's figures are waited for when all tokens are there.
FIGURES_S = 0.2

_NO_ROOM = (ResourceExhaustedError, AlreadyExistsError)  # the id is live while an earlier try's end is on its way
_WORKER_GONE = (UnavailableError, AbortedError, CancelledError)
_HANDOFF_BROKEN = (*_WORKER_GONE, DataLossError, FailedPreconditionError)
_SAMPLING_FAILED = "SAMPLING_FAILED"  # the model's own doing: any other worker would compute the same
Tokens = Sequence[GeneratedToken]


class RefusedError(Exception):
    """A worker has no room now: the request waits again, as if it had not been sent."""

    def __init__(self, worker: Worker, error: PageferryError) -> None:
        super().__init__(error.message)
        self.worker = worker


class PrefillFailedError(Exception):
    """The prompt's pages did not get to the decode worker; another try may succeed."""

    def __init__(self, worker: Worker, error: PageferryError) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error


class Attempt:
    """Use `tokens` once, and close it; `finish` is set when it has come to its end."""

    def __init__(
        self,
        grant: Grant,
        work: WorkItem,
        timeline: Timeline,
        *,
        timeout_s: float | None,
        in_context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Calls are made inside `in_context()`, so that their spans have the right parent."""
        self.finish: FinishReason = FINISH_REASON_UNSPECIFIED
        self._grant = grant
        self._work = work
        self._timeline = timeline
        self._timeout_s = timeout_s
        self._in_context = in_context
        self._calls: MergedCalls[Role] = MergedCalls()
        self._began = time.monotonic()
        self._patience_s: float | None = None  # for the next message
        self._is_over = False
        self._reserved = False
        self._first_token_seen = False
        self._num_decoded = 0
        self._shipped = False
        self._prefill_ended = False
        self._failure: PageferryError | None = None  # of one worker, while the other's word is waited for

    async def tokens(self) -> AsyncGenerator[Tokens, None]:
        """Batches as they come; a token may come twice, once from each worker.

        Raises RefusedError, PrefillFailedError, or the PageferryError that ends the request.
        """
        try:
            if self._grant.route.source is Source.PREFILL_ONLY:
                self._call_prefill(None)
            else:
                self._call_decode()
            while not self._is_over:
                item = await self._calls.get(self._patience_s)
                tokens = self._on_silence() if item is None else self._take(item)
                if tokens:
                    yield tokens
        finally:
            await self._calls.close()
            self._grant.release()

    def end(self, error: PageferryError) -> None:
        """Make `tokens` raise the error instead of the next message."""
        self._calls.interrupt(error)

    def _call_decode(self) -> None:
        is_local = self._grant.route.source is Source.LOCAL
        source = decode_pb2.PROMPT_SOURCE_LOCAL if is_local else decode_pb2.PROMPT_SOURCE_PUSHED
        request = decode_pb2.DecodeRequest(work=self._work, source=source)
        with self._in_context():
            self._calls.add(Role.DECODE, self._decode.decode.Decode(request, timeout=self._timeout_s))

    def _call_prefill(self, target: prefill_pb2.HandoffTarget | None) -> None:
        request = prefill_pb2.PrefillRequest(work=self._work, target=target)
        with self._in_context():
            self._calls.add(Role.PREFILL, self._prefill.prefill.Prefill(request, timeout=self._timeout_s))

    @property
    def _prefill(self) -> Worker:
        assert self._grant.prefill is not None, "the route has a prefill worker"
        return self._grant.prefill

    @property
    def _decode(self) -> Worker:
        assert self._grant.decode is not None, "the route has a decode worker"
        return self._grant.decode

    def _take(self, item: Item[Role]) -> Tokens:
        if item.message is None:
            return self._on_prefill_end(item.error) if item.name is Role.PREFILL else self._on_decode_end(item.error)
        match item.message.WhichOneof("event"):
            case "reserved":
                self._on_reserved(item.message.reserved)
            case "tokens":
                return self._on_tokens(item.message.tokens)
            case "completed":
                self._on_completed(item.message.completed)
            case "accepted":
                if self._grant.prefill_work is not None:
                    self._grant.prefill_work.accepted = True
            case "first_token":
                return self._on_first_token(item.message.first_token)
            case "shipped":
                self._on_shipped(item.message.shipped)
        return ()

    def _on_reserved(self, reserved: decode_pb2.Reserved) -> None:
        self._reserved = True
        self._timeline.reserve_s = time.monotonic() - self._began
        if self._grant.decode_work is not None:
            self._grant.decode_work.accepted = True
        if self._grant.route.source is not Source.PUSHED:
            return
        self._timeline.pages.format = reserved.layout.format
        self._timeline.pages.cached = reserved.cached_pages
        self._call_prefill(
            prefill_pb2.HandoffTarget(
                ticket=reserved.ticket,
                kv_endpoint=reserved.kv_endpoint,
                cached_tokens=reserved.cached_tokens,
                layout=reserved.layout,
            )
        )

    def _on_tokens(self, tokens: decode_pb2.Tokens) -> Tokens:
        # The commit has come through, whatever became of the prefill worker.
        self._failure, self._patience_s = None, None
        self._num_decoded += len(tokens.tokens)
        return list(tokens.tokens)

    def _on_first_token(self, first: prefill_pb2.FirstToken) -> Tokens:
        self._first_token_seen = True
        self._timeline.prefill_queue_ms = first.queue_ms
        self._timeline.prefill_ms = first.prefill_ms
        self._timeline.cached_tokens = first.cached_tokens
        if first.finish_reason != FINISH_REASON_UNSPECIFIED:
            self._end(first.finish_reason)
        elif self._grant.route.source is Source.PREFILL_ONLY:
            self._end(FINISH_REASON_LENGTH)
        return (first.token,)

    def _on_shipped(self, shipped: prefill_pb2.Shipped) -> None:
        self._shipped = True
        pages = self._timeline.pages
        pages.shipped, pages.bytes = shipped.pages, shipped.bytes
        in_flight_ms = shipped.in_flight_ms
        pages.hidden = min(1.0, max(0.0, 1 - shipped.tail_ms / in_flight_ms)) if in_flight_ms > 0 else 1.0
        self._timeline.transfer_tail_ms = shipped.tail_ms
        if self.finish != FINISH_REASON_UNSPECIFIED:
            self._is_over = True

    def _on_completed(self, completed: decode_pb2.Completed) -> None:
        timeline = self._timeline
        if self._grant.route.source is Source.LOCAL:
            timeline.prefill_queue_ms = completed.queue_ms
            timeline.prefill_ms = max(0.0, completed.prefill_ms - completed.queue_ms)
            timeline.cached_tokens = completed.cached_tokens
        else:
            timeline.decode_queue_ms = completed.queue_ms
            timeline.first_step_ms = completed.first_step_ms
        waits_for_figures = self._grant.route.source is Source.PUSHED and not self._shipped and not self._prefill_ended
        self._end(completed.reason)
        if waits_for_figures:
            self._is_over, self._patience_s = False, FIGURES_S

    def _end(self, reason: FinishReason) -> None:
        self.finish = reason
        self._is_over = True

    def _on_silence(self) -> Tokens:
        """The other worker's word did not come in time."""
        if self._failure is not None:
            raise PrefillFailedError(self._prefill, self._failure)
        self._is_over = True
        return ()

    def _on_prefill_end(self, error: PageferryError | None) -> Tokens:
        self._prefill_ended = True
        if self.finish != FINISH_REASON_UNSPECIFIED:
            self._is_over = True
            return ()
        if error is None:
            if self._first_token_seen:
                return ()
            error = InternalError(f"prefill worker {self._prefill.address} ended its stream without a token")
        if self._num_decoded or self._shipped:
            return ()  # it has done all that it is for
        if isinstance(error, _NO_ROOM) and not self._first_token_seen:
            raise RefusedError(self._prefill, error)
        if not _may_differ_elsewhere(error):
            raise error
        if self._first_token_seen and self._failure is None:
            # The commit may have come through all the same.
            self._failure, self._patience_s = error, COMMIT_S
            return ()
        raise PrefillFailedError(self._prefill, error)

    def _on_decode_end(self, error: PageferryError | None) -> Tokens:
        if self.finish != FINISH_REASON_UNSPECIFIED:
            return ()  # only the figures are waited for
        if error is None:
            error = InternalError(f"decode worker {self._decode.address} ended its stream without a result")
        if not self._reserved and isinstance(error, (*_NO_ROOM, UnavailableError)):
            raise RefusedError(self._decode, error)
        if not isinstance(error, _HANDOFF_BROKEN):
            raise error
        if self._grant.route.source is Source.LOCAL or self._num_decoded or self._shipped:
            raise UnavailableError(
                f"decode worker {self._decode.address} failed after {self._num_decoded} tokens: {error.message}",
                reason=error.reason,
                retry_after_ms=error.retry_after_ms,
            )
        if self._failure is not None or self._prefill_ended:
            raise PrefillFailedError(self._prefill, self._failure or error)
        self._failure, self._patience_s = error, CAUSE_S
        return ()


def _may_differ_elsewhere(error: PageferryError) -> bool:
    """Whether another worker may succeed where a prefill worker failed."""
    if isinstance(error, InternalError):
        return error.reason != _SAMPLING_FAILED
    return isinstance(error, (*_HANDOFF_BROKEN, ResourceExhaustedError, AlreadyExistsError))
