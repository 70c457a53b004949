"""A process that was forked from one that had used gRPC: its threads are not there, and a call would never return."""

import os

from pageferry.core.errors import FailedPreconditionError

_owner: int | None = None  # the process that first used gRPC here, or from which this one was forked


def claim_process() -> None:
    """Before a channel is made or used. FailedPreconditionError where the process was forked too late."""
    global _owner
    process = os.getpid()
    if _owner is None:
        _owner = process
    if _owner != process:
        message = (
            f"this process was forked from {_owner} after that had made a client, whose calls would never return here: "
            "fork before the first client is made, or start the process by spawn"
        )
        raise FailedPreconditionError(message, reason="FORKED")


def owns_process() -> bool:
    """Whether there is anything to close here."""
    return _owner == os.getpid()
