"""What follows when a worker fails a request: on which worker it goes on, how often, and what its client is told."""

from opentelemetry.trace import Span

from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.router.ask import Ask
from pageferry.router.failures import (
    DecodeLostError,
    RefusedError,
    WorkerFailedError,
    means_draining,
)
from pageferry.router.serving import Serving
from pageferry.router.workers import Role
from pageferry.runtime.logs import log

# How often a request may meet a worker that is not there: more than workers that die as it comes, and an end.
_MAX_UNREACHED = 8


class Recovery:
    """One request's. `refused` and `failed` prepare its Ask for the next try, or raise what ends the request."""

    def __init__(self, serving: Serving, request_id: str, span: Span) -> None:
        self.local_only = False  # no prefill worker can help any more
        self._fleet = serving.fleet
        self._metrics = serving.telemetry.metrics
        self._config = serving.config
        self._request_id = request_id
        self._span = span
        self._failure: WorkerFailedError | None = None  # the last one
        self._num_retries = self._num_resumes = self._num_unreached = 0

    def refused(self, refusal: RefusedError) -> None:
        """A worker took nothing of the request."""
        refusal.worker.view.refusing = True
        self._metrics.count_return(refusal.worker.role)
        self._span.add_event("pageferry.refused", {"worker": refusal.worker.address, "reason": str(refusal)})
        if isinstance(refusal.error, UnavailableError) and not means_draining(refusal.error):
            self._num_unreached += 1
            if self._num_unreached > _MAX_UNREACHED:
                raise self.with_cause(refusal.error)

    def failed(self, failure: WorkerFailedError, ask: Ask, num_tokens: int) -> None:
        """Another worker is to go on after `num_tokens`. One that drains has not failed, and is left for nothing."""
        self._failure = failure
        failure.worker.view.has_failed |= not failure.is_drained
        ask.excluded[failure.worker.address] = failure.identity.incarnation
        if num_tokens:  # an answer that another model went on with would be neither's
            ask.fingerprint = failure.identity.fingerprint
        if isinstance(failure, DecodeLostError):
            self._resume(failure, num_tokens)
        else:
            self._retry(failure, ask)

    def was_complete(self, failure: WorkerFailedError, num_tokens: int) -> None:
        """The worker was lost after its last token: nothing is left to do."""
        self._metrics.count_resume("complete")
        self._tell("decode_lost", failure, outcome="complete", tokens=num_tokens)

    def _retry(self, failure: WorkerFailedError, ask: Ask) -> None:
        """Another prefill worker, as often as is allowed, else the decode worker alone."""
        others = [worker for worker in self._fleet.ready(Role.PREFILL) if ask.may_use(worker)]
        if others and (failure.is_drained or self._num_retries < self._config.prefill_retries):
            self._num_retries += not failure.is_drained
            step = "other_prefill"
        else:
            step, self.local_only = "local", True
        self._metrics.count_prefill_failure(step)
        self._tell("prefill_failed", failure, next=step)
        self._span.set_attribute("pageferry.fallback", step)

    def _resume(self, loss: DecodeLostError, num_tokens: int) -> None:
        """Another decode worker, as often as is allowed."""
        self._num_resumes += not loss.is_drained
        outcome = "moved" if loss.is_drained else "resumed"
        if self._num_resumes > self._config.resumes:
            outcome = "given_up"
        self._metrics.count_resume(outcome)
        self._tell("decode_lost", loss, outcome=outcome, tokens=num_tokens)
        if outcome == "given_up":
            error = loss.error
            message = f"decode worker {loss.worker.address} failed after {num_tokens} tokens: {error.message}"
            raise UnavailableError(message, reason=error.reason, retry_after_ms=error.retry_after_ms)
        self._span.set_attribute("pageferry.resumed_at", num_tokens)

    def with_cause(self, error: PageferryError) -> PageferryError:
        """The error, and which worker failed before it, and why."""
        failure = self._failure
        if failure is None:
            return error
        cause = failure.error
        worker = f"{failure.worker.role.value} worker {failure.worker.address}"
        reason = cause.reason if isinstance(error, UnavailableError) else error.reason
        message = f"{worker} failed: {cause.message}; then {error.message}"
        return type(error)(message, reason=reason, retry_after_ms=error.retry_after_ms)

    def _tell(self, event: str, failure: WorkerFailedError, **facts: str | int) -> None:
        facts = {
            "worker": failure.worker.address,
            "code": failure.error.code,
            "reason": failure.error.reason,
            **facts,
        }
        self._span.add_event(f"pageferry.{event}", facts)
        log(event, level="warning", request_id=self._request_id, failure=facts)
