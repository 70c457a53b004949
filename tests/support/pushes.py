"""A proxy of the PageService that knows the messages of a push, to do to single ones what no network should."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from links import hold_port

from pageferry.v1.page_pb2 import PageFrame, PushRequest

_PUSH = "/pageferry.v1.PageService/Push"
_MAX_PUSHES = 64  # at once
Messages = Iterator[PushRequest]
Fault = Callable[[Messages], Messages]


class PushLink:
    """Pushes to `address` reach `target`, each page in a message of its own; use it as a context.

    Each push goes through the next of `faults`, while there are any, which gets its messages and gives those that are
    to arrive instead. Several links may share them.
    """

    def __init__(self, target: str, faults: deque[Fault] | None = None) -> None:
        self.target = target
        self.faults: deque[Fault] = deque() if faults is None else faults
        self.num_pages = 0  # that have come, here or through shared memory
        self._holder = hold_port()
        self._executor = ThreadPoolExecutor(_MAX_PUSHES, thread_name_prefix="pushes")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._holder.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._channel = grpc.insecure_channel(self.target, options=_RECONNECTS)
        self._push = self._channel.stream_stream(_PUSH)
        self._server = grpc.server(self._executor, options=(("grpc.so_reuseport", 0),))
        service, method = _PUSH.strip("/").split("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(self._pass_on)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(10)
        self._channel.close()
        self._executor.shutdown()
        self._holder.close()

    def _pass_on(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        fault = self.faults.popleft() if self.faults else iter
        away = (message.SerializeToString() for message in fault(self._singly(requests)))
        call = self._push(_until_broken(away, context), metadata=_own(context.invocation_metadata()))
        context.add_callback(call.cancel)
        try:
            yield from call
        except grpc.RpcError:
            context.set_trailing_metadata(_own(call.trailing_metadata() or ()))
            context.abort(call.code(), call.details())

    def _singly(self, requests: Iterable[bytes]) -> Messages:
        for data in requests:
            message = PushRequest.FromString(data)
            single = message.WhichOneof("message") != "frames"
            for part in [message] if single else [PushRequest(frame=frame) for frame in message.frames.frames]:
                self.num_pages += part.HasField("frame") + len(part.staged.page_indexes)
                yield part


_RECONNECTS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))


def _own(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[str, str | bytes], ...]:
    """Without what the libraries of both calls add by themselves."""
    return tuple((key, value) for key, value in metadata if key not in ("user-agent", "grpc-accept-encoding"))


def _until_broken(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """The sender's end, however it comes, ends the call to the receiver in the same way."""
    try:
        yield from messages
    except Exception:  # gRPC gives no reason when the caller is gone
        context.cancel()


def _frames(change: Callable[[int, PageFrame], Iterable[PageFrame]]) -> Fault:
    """Put other frames in the place of each, which is told by its number."""

    def fault(messages: Messages) -> Messages:
        number = 0
        for message in messages:
            if not message.HasField("frame"):
                yield message
                continue
            yield from (PushRequest(frame=frame) for frame in change(number, message.frame))
            number += 1

    return fault


def drop(number: int) -> Fault:
    """Frame `number`, counted from 0, is lost."""
    return _frames(lambda index, frame: () if index == number else (frame,))


def duplicate(number: int) -> Fault:
    """It comes twice."""
    return _frames(lambda index, frame: (frame, frame) if index == number else (frame,))


def flip(number: int, bit: int = 0) -> Fault:
    """A bit of its payload is another."""

    def change(index: int, frame: PageFrame) -> Iterable[PageFrame]:
        if index == number:
            payload = bytearray(frame.payload)
            payload[bit // 8] ^= 1 << bit % 8
            frame.payload = bytes(payload)
        return (frame,)

    return _frames(change)


def truncate(number: int) -> Fault:
    """The second half of its payload is missing."""

    def change(index: int, frame: PageFrame) -> Iterable[PageFrame]:
        if index == number:
            frame.payload = frame.payload[: len(frame.payload) // 2]
        return (frame,)

    return _frames(change)


def misplace(number: int, to: int) -> Fault:
    """It names another page of the sequence."""

    def change(index: int, frame: PageFrame) -> Iterable[PageFrame]:
        if index == number:
            frame.page_index = to
        return (frame,)

    return _frames(change)


def reorder(messages: Messages) -> Messages:
    """All frames come in the opposite order, just before the commit."""
    held: list[PushRequest] = []
    for message in messages:
        if message.HasField("frame"):
            held.append(message)
            continue
        if message.HasField("commit"):
            yield from reversed(held)
        yield message


def hold(number: int, gate: threading.Event) -> Fault:
    """Frame `number`, or what follows where there are fewer, waits for the gate."""

    def fault(messages: Messages) -> Messages:
        index = 0
        for message in messages:
            if (message.HasField("frame") and index >= number) or message.HasField("commit"):
                gate.wait(60)
            index += message.HasField("frame")
            yield message

    return fault


def break_off(number: int) -> Fault:
    """The stream breaks before frame `number`."""

    def change(index: int, frame: PageFrame) -> Iterable[PageFrame]:
        if index == number:
            raise ConnectionResetError
        return (frame,)

    return _frames(change)


def commit_first(messages: Messages) -> Messages:
    """The commit overtakes the last frame."""
    held: PushRequest | None = None
    for message in messages:
        if message.HasField("frame"):
            if held is not None:
                yield held
            held = message
            continue
        yield message
    if held is not None:
        yield held


def commit_twice(messages: Messages) -> Messages:
    for message in messages:
        yield message
        if message.HasField("commit"):
            yield message
