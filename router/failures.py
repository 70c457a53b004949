"""How a try at a request fails, and whether another one may succeed."""

from pageferry.core.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PageferryError,
    ResourceExhaustedError,
    UnavailableError,
)
from pageferry.router.view import Identity
from pageferry.router.workers import LOST, Worker

_EARLY_S = 0.02  # by which a call may be ended before what is taken for its deadline here
_SAMPLING_FAILED = "SAMPLING_FAILED"  # the model's own doing: any other worker would compute the same
_DRAINING = "DRAINING"
# A call that ends so says that its worker is gone or leaves, and not what became of the request on it. The first three
# are the transport's own.
_GONE = ("UNAVAILABLE", "CANCELLED", "STREAM_BROKEN", "SUBSCRIPTION_ENDED", "ENGINE_FAILED", "ENGINE_STOPPED", LOST)


class RefusedError(Exception):
    """A worker has no room now: the request waits again, as if it had not been sent."""

    def __init__(self, worker: Worker, error: PageferryError) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error


class WorkerFailedError(Exception):
    """A worker failed the request; another try, on another one, may succeed."""

    def __init__(self, worker: Worker, identity: Identity, error: PageferryError) -> None:
        """`identity` is the worker's when the try began."""
        super().__init__(error.message)
        self.worker = worker
        self.identity = identity
        self.error = error

    @property
    def is_drained(self) -> bool:
        """Whether it ended what it had since it drains, which is no failure."""
        return means_draining(self.error)


class PrefillFailedError(WorkerFailedError):
    """The prompt's pages did not get to the decode worker."""


class DecodeLostError(WorkerFailedError):
    """The decode worker is gone, or leaves, and with it all that it had of the request."""


def means_no_room(error: PageferryError) -> bool:
    """Whether a worker refuses for now. A live id is that of an earlier try, whose end is on its way."""
    return isinstance(error, ResourceExhaustedError | AlreadyExistsError)


def means_draining(error: PageferryError) -> bool:
    return isinstance(error, UnavailableError) and error.reason == _DRAINING


def means_gone(error: PageferryError) -> bool:
    """Whether the worker itself is gone or leaves, rather than what the request needed of another one."""
    return isinstance(error, UnavailableError | CancelledError) and error.reason in (*_GONE, _DRAINING)


def means_broken(error: PageferryError) -> bool:
    """Whether a worker, or the hand-off to it, broke off, through no fault of the request."""
    return isinstance(error, UnavailableError | AbortedError | CancelledError | DataLossError | FailedPreconditionError)


def may_differ_elsewhere(error: PageferryError) -> bool:
    """Whether another worker may succeed where a prefill worker failed."""
    if isinstance(error, InternalError):
        return error.reason != _SAMPLING_FAILED
    return means_broken(error) or means_no_room(error)


def why_left(deadline: float | None, now: float) -> PageferryError:
    """Why a caller stopped listening, as far as can be told."""
    if deadline is not None and deadline - _EARLY_S <= now:
        return DeadlineExceededError("the caller's deadline passed")
    return CancelledError("the caller went away")
