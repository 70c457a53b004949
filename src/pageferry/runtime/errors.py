"""Errors of the core as gRPC statuses with details, and back."""

from collections.abc import Iterator
from typing import Any, Never

import grpc
from google.protobuf.any_pb2 import Any as PackedMessage
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from pageferry.core import errors

DOMAIN = "pageferry"
# A status travels in a header, and peers refuse headers above 8 KiB.
MAX_MESSAGE_BYTES = 1024
MAX_DESCRIPTION_BYTES = 256
MAX_VIOLATIONS = 8
_DETAILS_KEY = "grpc-status-details-bin"
_CLASSES = {kind.code: kind for kind in errors.PageferryError.__subclasses__()}
# Details of a call that was on its way when the peer's server stopped, before any handler had it.
_DROPPED = "CANCELLED"
# What the transport reports, as INTERNAL or CANCELLED, where the peer or a proxy dropped a stream half-way.
_BROKEN_STREAM = ("Stream removed", "RST_STREAM", "GOAWAY", "Socket closed", "Connection reset")


def to_status(error: errors.PageferryError) -> Status:
    """The error with ErrorInfo, and with BadRequest and RetryInfo where it carries them."""
    details: list[ErrorInfo | BadRequest | RetryInfo] = [ErrorInfo(domain=DOMAIN, reason=error.reason)]
    if error.violations:
        details.append(BadRequest())
        for violation in error.violations[:MAX_VIOLATIONS]:
            description = _short(violation.description, MAX_DESCRIPTION_BYTES)
            details[-1].field_violations.add(field=violation.field, description=description)
    if error.retry_after_ms is not None:
        details.append(RetryInfo())
        details[-1].retry_delay.FromMilliseconds(error.retry_after_ms)
    status = Status(code=grpc.StatusCode[error.code].value[0], message=_short(error.message, MAX_MESSAGE_BYTES))
    for detail in details:
        packed = PackedMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: errors.PageferryError) -> Never:
    """End the call with the error's status and details; always raises."""
    status = rpc_status.to_status(to_status(error))
    marks = ((errors.NOTHING_BEGUN, "1"),) if error.nothing_begun else ()
    await context.abort(status.code, status.details, (*status.trailing_metadata, *marks))


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str = "the peer") -> errors.PageferryError:
    """The error as it was raised at the peer: class, message, reason, violations, and when to try again.

    `peer` is what a message calls it where the connection to it broke, of which the transport says only how.

    A stream that broke half-way is an UnavailableError, whatever code the transport gives it: INTERNAL, CANCELLED or
    UNKNOWN without our details come from a dying peer or a proxy, and another try may reach another worker.
    """
    code, message, status = error.code(), error.details() or "", _status(error)
    info = next((info for info in _unpack(status, ErrorInfo) if info.domain == DOMAIN), None)
    if info is None and _is_broken_stream(code, message):
        return errors.UnavailableError(_broken(peer, message), reason="STREAM_BROKEN")
    if info is None and code is grpc.StatusCode.UNAVAILABLE and _tells_of_a_break(message):
        return errors.UnavailableError(_broken(peer, message))
    if info is None and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = "the deadline passed"  # here, while the call ran; the transport's words are about its stream
    retry = next(_unpack(status, RetryInfo), None)
    violations = [violation for bad in _unpack(status, BadRequest) for violation in bad.field_violations]
    return _CLASSES.get(code.name, errors.InternalError)(
        message or f"{peer} answered with {code.name}, and no more",
        reason=info.reason if info else "",
        retry_after_ms=retry.retry_delay.ToMilliseconds() if retry else None,
        violations=tuple(errors.FieldViolation(violation.field, violation.description) for violation in violations),
    )


def _short(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= max_bytes else encoded[:max_bytes].decode(errors="ignore") + "…"


def _is_broken_stream(code: grpc.StatusCode, message: str) -> bool:
    if code is grpc.StatusCode.UNKNOWN:
        return True
    transport_codes = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    if code is grpc.StatusCode.CANCELLED and message == _DROPPED:
        return True
    return code in transport_codes and _tells_of_a_break(message)


def _tells_of_a_break(message: str) -> bool:
    return any(sign in message for sign in _BROKEN_STREAM)


def _broken(peer: str, message: str) -> str:
    return f"the connection to {peer} broke: {message}" if message else f"the connection to {peer} broke"


def _unpack(status: Status, kind: type[Any]) -> Iterator[Any]:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            yield message


def _status(error: grpc.aio.AioRpcError) -> Status:
    """The peer's details; empty where there are none or they can't be read."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                break
    return Status()
