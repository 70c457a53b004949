"""Errors across a call: class, message, reason and details arrive as they were raised."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from loopback import loopback
from opentelemetry.trace import NoOpTracer

from pageferry.core import errors
from pageferry.runtime.errors import from_rpc_error, to_status
from pageferry.v1 import decode_pb2, decode_pb2_grpc

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PageferryError)]


async def raised_by(handler: Any) -> errors.PageferryError:
    async with loopback(NoOpTracer(), decode=handler) as (_, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Decode(decode_pb2.DecodeRequest()):
                pass
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not errors.PageferryError])
async def test_an_error_crosses_a_call_whole(kind: type[errors.PageferryError]) -> None:
    async def fail(request: Any, context: Any) -> Any:
        yield decode_pb2.DecodeResponse()
        raise kind(
            "queue is full: 8 of 8",
            reason="QUEUE_FULL",
            retry_after_ms=1250,
            violations=(errors.FieldViolation("sampling.top_p", "is 7"),),
        )

    error = await raised_by(fail)
    assert type(error) is kind
    assert (error.message, error.reason, error.retry_after_ms) == ("queue is full: 8 of 8", "QUEUE_FULL", 1250)
    assert error.violations == (errors.FieldViolation("sampling.top_p", "is 7"),)


def test_an_error_without_a_message_names_its_code() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert from_rpc_error(error, "the router").message == "the router answered with UNIMPLEMENTED, and no more"


@pytest.mark.parametrize("letter", ["x", "\n", "京"])
async def test_an_error_too_long_for_a_header_is_cut(letter: str) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise errors.InvalidArgumentError(
            letter * 100_000,
            reason="TOO_LONG",
            violations=tuple(errors.FieldViolation("prompt", letter * 100_000) for _ in range(50)),
        )
        yield

    error = await raised_by(fail)
    assert (type(error), error.reason) == (errors.InvalidArgumentError, "TOO_LONG")
    assert error.message.startswith(letter * 300)
    assert error.message.endswith("…")


async def test_a_cancelled_wait_inside_a_handler_is_no_cancelled_call() -> None:
    async def fail(request: Any, context: Any) -> Any:
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner
        yield

    error = await raised_by(fail)
    assert (type(error), error.message) == (errors.InternalError, "internal error: CancelledError")


async def test_an_unknown_exception_is_internal_and_its_text_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise ValueError("the prompt was: secret")
        yield

    error = await raised_by(fail)
    assert type(error) is errors.InternalError
    assert error.message == "internal error: ValueError"
    assert [record.message for record in caplog.records] == ["handler_failed"]


async def test_a_handlers_own_abort_passes_through() -> None:
    async def fail(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no", (("retry-after-ms", "500"),))
        yield

    async with loopback(NoOpTracer(), decode=fail) as (_, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Decode(decode_pb2.DecodeRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="no") as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["retry-after-ms"] == "500"


def test_details_are_those_that_other_clients_know() -> None:
    error = errors.ResourceExhaustedError(
        "full", reason="FULL", retry_after_ms=1500, violations=(errors.FieldViolation("a", "b"),)
    )
    info, bad_request, retry = ErrorInfo(), BadRequest(), RetryInfo()
    for packed, message in zip(to_status(error).details, (info, bad_request, retry), strict=True):
        assert packed.Unpack(message)
    assert (info.domain, info.reason) == ("pageferry", "FULL")
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert bad_request.field_violations[0].field == "a"


def rpc_error(code: grpc.StatusCode, details: str, *metadata: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.INTERNAL, "Stream removed"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.CANCELLED, "Received RST_STREAM with error code 8"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.UNKNOWN, ""),
        (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer"),
    ],
)
def test_a_broken_stream_is_unavailable_and_retryable(code: grpc.StatusCode, details: str) -> None:
    error = from_rpc_error(rpc_error(code, details))
    assert type(error) is errors.UnavailableError
    assert error.retryable


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_a_connection_that_broke_is_told_with_whom_it_was(code: grpc.StatusCode) -> None:
    error = from_rpc_error(rpc_error(code, "Stream removed (Socket closed)"), "the router")
    assert error.message == "the connection to the router broke: Stream removed (Socket closed)"


def test_an_internal_error_of_the_peer_stays_one() -> None:
    assert type(from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "logits are not numbers"))) is errors.InternalError


def test_a_deadline_that_passed_here_is_told_without_the_transports_words() -> None:
    none = grpc.aio.Metadata()
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, none, none, details="Stream removed (Deadline Exceeded)"
    )
    error = from_rpc_error(failed)
    assert (type(error), error.message) == (errors.DeadlineExceededError, "the deadline passed")


def test_codes_that_have_no_class_of_their_own_are_internal() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.OUT_OF_RANGE, "too far"))
    assert (type(error), error.message) == (errors.InternalError, "too far")


def test_details_that_cannot_be_read_are_left_out() -> None:
    broken = rpc_error(grpc.StatusCode.NOT_FOUND, "gone", ("grpc-status-details-bin", b"\xff\xff"))
    assert type(from_rpc_error(broken)) is errors.NotFoundError
