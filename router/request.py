"""The life of one answer to an admitted request: queue, workers, retries, text."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence as ListLike
from contextlib import aclosing, contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from pageferry.core.errors import InternalError, PageferryError, UnavailableError
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.router.admission import Admitted
from pageferry.router.ask import Ask, Grant
from pageferry.router.attempt import Attempt, Tokens
from pageferry.router.candidates import Demand
from pageferry.router.failures import RefusedError, WorkerFailedError
from pageferry.router.recovery import Recovery
from pageferry.router.serving import Serving
from pageferry.router.timeline import Timeline
from pageferry.router.work import ask_of, demand_of, work_of
from pageferry.runtime.convert import finish_to_proto
from pageferry.runtime.convert_work import work_to_proto
from pageferry.runtime.telemetry import PastSpans
from pageferry.text.detokenize import TextStream
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason, Hypothesis


class Generation:
    """One answer. Use `deltas` once, inside `asked`, and close it: that ends everything that was begun for it."""

    def __init__(
        self,
        serving: Serving,
        admitted: Admitted,
        text: TextStream,
        timeline: Timeline,
        context: Context,
        choice: int = 0,
    ) -> None:
        """`context` holds the span that its own are children of."""
        self.finish: FinishReason = FINISH_REASON_UNSPECIFIED
        self.choice = choice
        self.timeline = timeline
        self.stored = asyncio.Event()  # a decode worker holds the prompt's pages, or nothing more comes of this
        self.decode = ""  # that worker's address
        self.is_live = False
        self.hypotheses: ListLike[Hypothesis] = ()  # of a beam search, instead of deltas
        self._serving = serving
        self._clock = serving.clock
        self._admitted = admitted
        self._text = text
        self._span = get_current_span(context)
        self._telemetry = serving.telemetry
        self._context = context
        self._spans = PastSpans(serving.telemetry.tracer, lambda: timeline.wall_ns(0.0))
        self._output_ids: list[int] = []
        self._recovery = Recovery(serving, admitted.request_id, self._span)
        self._error: PageferryError | None = None  # that was given to `end`
        self._ask: Ask | None = None
        self._near = ""
        self._current: Attempt | None = None

    @property
    def num_tokens(self) -> int:
        """Generated so far, as far as they belong to the text."""
        return self._text.num_tokens + sum(len(one.token_ids) for one in self.hypotheses)

    @property
    def matched_stop(self) -> str:
        """The stop string that ended it, if one did."""
        return self._text.matched_stop or ""

    @contextmanager
    def asked(self, deadline: float | None, near: str = "") -> Iterator[None]:
        """It waits for workers, or runs, inside the block. Raises what the dispatcher's `enqueue` does.

        `near` is the address of a decode worker that is to be preferred, and that an answer to the same request has
        been let in for: then the queue may be full.
        """
        dispatcher = self._serving.dispatcher
        self._near = near
        ask = self._ask = ask_of(self._admitted, self._demand(), deadline)
        dispatcher.enqueue(ask, is_let_in=self.choice > 0)
        self.is_live = True
        try:
            yield
        finally:
            self.is_live = False
            dispatcher.abandon(ask)

    async def deltas(self) -> AsyncGenerator[pb.Delta, None]:
        """All of the answer; then `finish` is set. Or it raises the PageferryError that ends it."""
        assert self._ask is not None, "to be used inside `asked`"
        try:
            async with aclosing(self._tokens(self._ask)) as batches:
                async for batch in batches:
                    yield self._delta(batch)
                    if self._text.matched_stop is not None:
                        self.finish = FINISH_REASON_STOP
                        break
        finally:
            self.stored.set()
        tail = self._text.finish()
        if tail and not self.hypotheses:
            yield pb.Delta(text=tail, choice=self.choice)

    def end(self, error: PageferryError) -> None:
        """Make `deltas` raise the error at the next chance."""
        self._error = error
        if self._ask is not None:
            self._serving.dispatcher.fail(self._ask, error)
        if self._current is not None:
            self._current.end(error)

    def _demand(self) -> Demand:
        """What is left to do, as workers are chosen for it."""
        local_only = self._recovery.local_only
        return demand_of(self._admitted, len(self._output_ids), local_only=local_only, near=self._near)

    def _work(self) -> WorkItem:
        """The same, as a worker takes it."""
        return work_of(self._admitted, self._output_ids, choice=self.choice, num_tries=self.timeline.num_tries)

    def _delta(self, batch: Tokens) -> pb.Delta:
        before = self._text.num_tokens
        text = self._text.push(token.token_id for token in batch)
        tokens = batch[: self._text.num_tokens - before]
        prompt_logprobs = self._current.prompt_logprobs if self._current is not None and before == 0 else None
        return pb.Delta(text=text, tokens=tokens, choice=self.choice, prompt_logprobs=prompt_logprobs)

    async def _tokens(self, ask: Ask) -> AsyncGenerator[Tokens, None]:
        """New tokens in order, each once, over as many tries as it takes and is allowed."""
        while True:
            grant = await self._granted(ask)
            attempt = self._current = self._attempt(grant, ask.deadline)
            if self._error is not None:  # it came after the grant
                attempt.end(self._error)
            try:
                async with aclosing(attempt.tokens()) as batches:
                    async for batch in batches:
                        if not self.stored.is_set() and attempt.has_decoded:
                            self.decode = grant.decode_address
                            self.stored.set()
                        fresh = self._fresh(batch)
                        if fresh:
                            yield fresh
                self.finish, self.hypotheses = attempt.finish, attempt.hypotheses
                if self.hypotheses:
                    self._note_tokens(len(self.hypotheses[0].token_ids))
                return
            except RefusedError as refusal:
                self._recovery.refused(refusal)
            except WorkerFailedError as failure:
                if self._is_complete(failure):
                    return
                self._recovery.failed(failure, ask, len(self._output_ids))
            except (UnavailableError, InternalError) as error:
                raise self._recovery.with_cause(error) from error
            self._ask_again(ask)

    def _is_complete(self, failure: WorkerFailedError) -> bool:
        """Whether all tokens had come, and the word that these were all had not."""
        reason = Sequence(self._work(), 0.0).finish_reason()
        if reason is None:
            return False
        self.finish = finish_to_proto(reason)
        self._recovery.was_complete(failure, len(self._output_ids))
        return True

    def _ask_again(self, ask: Ask) -> None:
        """Let it wait in its old place, for what is left to do."""
        if self._error is not None:
            raise self._error
        ask.demand = self._demand()
        ask.token_ids = [*self._admitted.prompt_ids, *self._output_ids]
        self._serving.dispatcher.put_back(ask)

    async def _granted(self, ask: Ask) -> Grant:
        """Wait in the queue; the wait and the choice become spans."""
        enqueued = ask.enqueued
        grant: Grant | None = None
        try:
            grant = await self._serving.dispatcher.wait(ask)
        except UnavailableError as error:
            raise self._recovery.with_cause(error) from error
        finally:
            left = grant.began if grant is not None else self._clock()
            self._spans.record("queue", self._context, enqueued, left, {})
            self._telemetry.left_queue(self._span, left - enqueued)
        if self.timeline.first_token is None:
            self.timeline.parts.queue_ms += (grant.ended - enqueued) * 1000
        attributes = {"pageferry.route.source": grant.route.source.value, **grant.route.attributes}
        self._spans.record("route", self._context, grant.began, grant.ended, attributes)
        return grant

    def _attempt(self, grant: Grant, deadline: float | None) -> Attempt:
        self.timeline.num_tries += 1
        self.timeline.workers = (grant.prefill_address, grant.decode_address)
        return Attempt(
            self._serving,
            grant,
            work_to_proto(self._work()),
            self.timeline,
            self._span,
            timeout_s=None if deadline is None else max(0.0, deadline - self._clock()),
            max_unread_tokens=max(1, self._serving.config.max_unread_tokens // self._admitted.num_choices),
        )

    def _fresh(self, batch: Tokens) -> Tokens:
        """The batch without tokens that have come before."""
        fresh = [token for token in batch if token.position >= len(self._output_ids)]
        for position, token in enumerate(fresh, len(self._output_ids)):
            if token.position != position:
                message = f"a worker sent position {token.position} where {position} comes next"
                raise InternalError(message, reason="POSITION_GAP")
        if fresh:
            self._output_ids += [token.token_id for token in fresh]
            self._note_tokens(len(fresh))
        return fresh

    def _note_tokens(self, num_tokens: int) -> None:
        gap_s = self.timeline.note_tokens(self._clock(), num_tokens)
        self._telemetry.tokens_came(num_tokens, gap_s)
        if gap_s is None and self.choice == 0:
            self._telemetry.began(self._span, self.timeline.ttft_s)
