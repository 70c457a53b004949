"""The errors that cross a service's border, each saying whose fault it is and whether trying again can help.

One interceptor turns them into a gRPC status (the class's `code`) with ErrorInfo, BadRequest and RetryInfo, and the
gateway into an HTTP status. Messages name the field, the value and the limit, and hold no text of a request.
"""

from dataclasses import dataclass
from reprlib import Repr
from typing import ClassVar

MAX_MESSAGE_CHARACTERS = 2000  # what an error says of a file or a peer is as long as they like
NOTHING_BEGUN = "pageferry-nothing-begun"  # a header of answers after which proxies may send the request elsewhere


class _Short(Repr):
    """As `repr`, of part of what is long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write what has thousands of digits."""
        return repr(value) if value.bit_length() <= 200 else f"a number of {value.bit_length()} bits"


shown = _Short().repr


@dataclass(frozen=True)
class FieldViolation:
    """One field that is wrong: its path in the request, and what is wrong with it."""

    field: str
    description: str


class PageferryError(Exception):
    """Base of all; `reason` is the stable UPPER_SNAKE name that ErrorInfo carries.

    `nothing_begun`: the request was turned away before anything was done for it, so that whoever stands between may
    send it elsewhere without asking the caller, and no generation starts twice.
    """

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_ms: int | None = None,
        violations: tuple[FieldViolation, ...] = (),
        nothing_begun: bool = False,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
        message = message.encode(errors="replace").decode()  # half a character of a file's text can't be written
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code
        self.retry_after_ms = retry_after_ms
        self.violations = violations
        self.nothing_begun = nothing_begun


class InvalidArgumentError(PageferryError):
    """The caller's request is wrong and will stay wrong."""

    code, http_status = "INVALID_ARGUMENT", 400


class UnauthenticatedError(PageferryError):
    """The caller has shown no credentials, or none that are known."""

    code, http_status = "UNAUTHENTICATED", 401


class PermissionDeniedError(PageferryError):
    """The caller is known, and may not do this."""

    code, http_status = "PERMISSION_DENIED", 403


class NotFoundError(PageferryError):
    """The named thing does not exist."""

    code, http_status = "NOT_FOUND", 404


class AlreadyExistsError(PageferryError):
    """A live request has this id."""

    code, http_status = "ALREADY_EXISTS", 409


class FailedPreconditionError(PageferryError):
    """The state does not allow it: a ticket that is unknown or used, or layouts that differ."""

    code, http_status = "FAILED_PRECONDITION", 409


class ResourceExhaustedError(PageferryError):
    """No room: a full queue, no pages, a message over its limit."""

    code, http_status, retryable = "RESOURCE_EXHAUSTED", 429, True


class UnavailableError(PageferryError):
    """A worker is gone, warming up or draining; another try may find another one."""

    code, http_status, retryable = "UNAVAILABLE", 503, True


class AbortedError(PageferryError):
    """A hand-off was broken off."""

    code, http_status, retryable = "ABORTED", 503, True


class DeadlineExceededError(PageferryError):
    """The caller's deadline has passed."""

    code, http_status = "DEADLINE_EXCEEDED", 504


class CancelledError(PageferryError):
    """The caller went away. (Not asyncio's.)"""

    code, http_status = "CANCELLED", 499


class UnimplementedError(PageferryError):
    """Asked for something that this version does not do."""

    code, http_status = "UNIMPLEMENTED", 501


class InternalError(PageferryError):
    """Our own fault, such as logits that are not numbers."""

    code, http_status = "INTERNAL", 500


class DataLossError(PageferryError):
    """Bytes do not match their checksum."""

    code, http_status, retryable = "DATA_LOSS", 500, True


def invalid(field: str, value: object, limit: str, *, reason: str = "INVALID_FIELD") -> InvalidArgumentError:
    """The error for one bad field, e.g. `invalid("temperature", nan, "must be 0 or finite and positive")`."""
    return invalid_field(field, f"is {shown(value)}, {limit}", reason=reason)


def invalid_field(field: str, description: str, *, reason: str = "INVALID_FIELD") -> InvalidArgumentError:
    """The same where the value is not to be repeated; `description` reads on from the field's name."""
    violations = (FieldViolation(field, description),)
    return InvalidArgumentError(f"{field} {description}", reason=reason, violations=violations)
