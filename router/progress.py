"""How far a try at a request has come, and what it means there that a worker's call ends."""

from collections.abc import Mapping

from pageferry.core.errors import InternalError, PageferryError, UnavailableError
from pageferry.router.failures import (
    DecodeLostError,
    PrefillFailedError,
    RefusedError,
    may_differ_elsewhere,
    means_broken,
    means_draining,
    means_gone,
    means_no_room,
)
from pageferry.router.policy import Source
from pageferry.router.workers import Role, Worker

# How long the other worker's word is waited for, once one of them has failed: each knows why a hand-off broke, or is
# what broke it, and the decode worker may have had its commit before the prefill worker died.
CAUSE_S = 0.2
COMMIT_S = 0.5


class Progress:
    """Told by the try what has come."""

    def __init__(self, source: Source, workers: Mapping[Role, Worker]) -> None:
        self._source = source
        self._workers = workers
        self.open: set[Role] = set()  # calls that have not ended
        self._ended: set[Role] = set()
        self.is_reserved = self.has_first_token = self.is_shipped = False
        self.num_decoded = 0
        self.failure: PageferryError | None = None  # of one worker, while the other's word is waited for
        self.patience_s: float | None = None  # for the next message
        self._identities = {role: worker.view.identity for role, worker in workers.items()}

    def prefill_failed(self, error: PageferryError) -> PrefillFailedError:
        return PrefillFailedError(self._workers[Role.PREFILL], self._identities[Role.PREFILL], error)

    def on_tokens(self, num_tokens: int) -> None:
        """Of the decode worker."""
        self.num_decoded += num_tokens
        if self.failure is not None and Role.DECODE not in self._ended:
            # The commit has come through, whatever became of the prefill worker.
            self.failure, self.patience_s = None, None

    def on_end(self, role: Role, error: PageferryError | None, *, is_over: bool) -> None:
        """A call has ended; `is_over` says whether all has come.

        Raises what ends the try, or notes the failure while the other worker's word is waited for.
        """
        is_known = role in self._ended  # a worker that is given up may have a word of its own yet
        self.open.discard(role)
        self._ended.add(role)
        if not is_over and not is_known:
            self._on_prefill_end(error) if role is Role.PREFILL else self._on_decode_end(error)

    def _on_prefill_end(self, error: PageferryError | None) -> None:
        worker = self._workers[Role.PREFILL]
        if error is None:
            if self.has_first_token:
                return
            error = InternalError(f"prefill worker {worker.address} ended its stream without a token")
        if self.num_decoded or self.is_shipped:
            return  # it has done all that it is for
        if (means_no_room(error) or means_draining(error)) and not self.has_first_token:
            raise RefusedError(worker, error)
        if not may_differ_elsewhere(error):
            raise error
        if self.failure is not None:  # the decode worker's word says more than that the prefill worker's call broke
            raise self.prefill_failed(self.failure if means_gone(error) else error)
        if self.has_first_token:  # the commit may have come through all the same
            self.failure, self.patience_s = error, COMMIT_S
        elif means_gone(error) and Role.DECODE in self.open:  # or is it the decode worker that is gone?
            self.failure, self.patience_s = error, CAUSE_S
        else:
            raise self.prefill_failed(error)

    def _on_decode_end(self, error: PageferryError | None) -> None:
        worker = self._workers[Role.DECODE]
        if error is None:
            error = InternalError(f"decode worker {worker.address} ended its stream without a result")
        if not self.is_reserved and (means_no_room(error) or isinstance(error, UnavailableError)):
            raise RefusedError(worker, error)
        if not means_broken(error):
            raise error
        if self._source is Source.LOCAL or self.num_decoded or self.is_shipped or means_gone(error):
            raise DecodeLostError(worker, self._identities[Role.DECODE], error)
        if self.failure is not None or Role.PREFILL not in self.open:
            known = self.failure
            raise self.prefill_failed(error if known is None or means_gone(known) else known)
        self.failure, self.patience_s = error, CAUSE_S
