"""What follows when a worker fails a request: on which worker it goes on, how often, and what its client is told."""

from opentelemetry.trace import Span

from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.router.dispatch import Ask
from pageferry.router.failures import (
    DecodeLostError,
    PrefillFailedError,
    RefusedError,
    WorkerFailedError,
    means_draining,
)
from pageferry.router.fleet import Fleet
from pageferry.router.workers import Role
from pageferry.runtime.logs import log
from pageferry.runtime.metrics import RouterMetrics

# How often a request may meet a worker that is not there: more than workers that die as it comes, and an end.
_MAX_UNREACHED = 8


class Recovery:
    """One request's. Each method changes its Ask for the next try, or raises the error that ends the request."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, request_id: str, span: Span) -> None:
        self.local_only = False  # no prefill worker can help any more
        self._fleet = fleet
        self._metrics = metrics
        self._request_id = request_id
        self._span = span
        self._failure: WorkerFailedError | None = None  # the last one
        self._num_retries = self._num_resumes = self._num_unreached = 0

    def refused(self, refusal: RefusedError) -> None:
        """A worker took nothing of the request."""
        refusal.worker.view.refusing = True
        self._span.add_event("pageferry.refused", {"worker": refusal.worker.address, "reason": str(refusal)})
        if isinstance(refusal.error, UnavailableError) and not means_draining(refusal.error):
            self._num_unreached += 1
            if self._num_unreached > _MAX_UNREACHED:
                raise self.with_cause(refusal.error)

    def prefill_failed(self, failure: PrefillFailedError, ask: Ask, *, num_tokens: int, retries: int) -> None:
        """Another prefill worker, `retries` times, else the decode worker alone."""
        self._leave(failure, ask, num_tokens)
        others = [w for w in self._fleet.ready(Role.PREFILL) if ask.may_use(w)]
        if others and (failure.is_drained or self._num_retries < retries):
            self._num_retries += not failure.is_drained
            step = "other_prefill"
        else:
            step, self.local_only = "local", True
        self._metrics.count_prefill_failure(step)
        self._tell("prefill_failed", failure, next=step)
        self._span.set_attribute("pageferry.fallback", step)

    def decode_lost(self, loss: DecodeLostError, ask: Ask, *, num_tokens: int, resumes: int) -> None:
        """Another decode worker goes on after `num_tokens`, `resumes` times; one that drains does not count."""
        self._leave(loss, ask, num_tokens)
        if loss.is_drained:
            outcome = "moved"
        else:
            self._num_resumes += 1
            outcome = "resumed" if self._num_resumes <= resumes else "given_up"
        self._metrics.count_resume(outcome)
        self._tell("decode_lost", loss, outcome=outcome, tokens=num_tokens)
        if outcome == "given_up":
            error = loss.error
            message = f"decode worker {loss.worker.address} failed after {num_tokens} tokens: {error.message}"
            raise UnavailableError(message, reason=error.reason, retry_after_ms=error.retry_after_ms)
        self._span.set_attribute("pageferry.resumed_at", num_tokens)

    def was_complete(self, loss: DecodeLostError, num_tokens: int) -> None:
        """The decode worker was lost after its last token: nothing is left to do."""
        self._metrics.count_resume("complete")
        self._tell("decode_lost", loss, outcome="complete", tokens=num_tokens)

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

    def _leave(self, failure: WorkerFailedError, ask: Ask, num_tokens: int) -> None:
        self._failure = failure
        ask.excluded[failure.worker.address] = failure.identity.incarnation
        if num_tokens:  # an answer that another model went on with would be neither's
            ask.fingerprint = failure.identity.fingerprint

    def _tell(self, event: str, failure: WorkerFailedError, **facts: str | int) -> None:
        facts = {
            "worker": failure.worker.address,
            "code": failure.error.code,
            "reason": failure.error.reason,
            **facts,
        }
        self._span.add_event(f"pageferry.{event}", facts)
        log(event, level="warning", request_id=self._request_id, failure=facts)
