"""How a try at a request fails, and whether another one may succeed."""

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
from pageferry.router.workers import Worker

_SAMPLING_FAILED = "SAMPLING_FAILED"  # the model's own doing: any other worker would compute the same


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


def means_no_room(error: PageferryError) -> bool:
    """Whether a worker refuses for now. A live id is that of an earlier try, whose end is on its way."""
    return isinstance(error, ResourceExhaustedError | AlreadyExistsError)


def means_broken(error: PageferryError) -> bool:
    """Whether a worker, or the hand-off to it, broke off, through no fault of the request."""
    return isinstance(error, UnavailableError | AbortedError | CancelledError | DataLossError | FailedPreconditionError)


def may_differ_elsewhere(error: PageferryError) -> bool:
    """Whether another worker may succeed where a prefill worker failed."""
    if isinstance(error, InternalError):
        return error.reason != _SAMPLING_FAILED
    return means_broken(error) or means_no_room(error)
