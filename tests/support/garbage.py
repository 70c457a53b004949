"""Connections as strangers make them: random bytes, broken HTTP/2, calls with wrong fields, huge metadata, silence.

Raw sockets and hand-made HTTP/2, since a gRPC library would refuse to send most of it, and would cost far more.
"""

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from http2_bytes import BEGINNING, PREFACE, call, frame
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pageferry.v1 import decode_pb2, inference_pb2, page_pb2, prefill_pb2, worker_pb2

ANSWER_S = 5.0  # that an answer is waited for
HOLD_S = 3.0  # that a silent connection stays open
_STATUS = re.compile(rb"grpc-status[\x01-\x02](\d+)")  # gRPC's library sends it as it is, on a connection's first call
_PACKAGE = "/pageferry.v1."

# What is called on each kind of port, and with what.
METHODS: Mapping[str, Sequence[tuple[str, type[Message]]]] = {
    "router": (
        (_PACKAGE + "InferenceService/Generate", inference_pb2.GenerateRequest),
        (_PACKAGE + "InferenceService/Tokenize", inference_pb2.TokenizeRequest),
        (_PACKAGE + "InferenceService/GetTrace", inference_pb2.GetTraceRequest),
        (_PACKAGE + "InferenceService/NoSuchMethod", inference_pb2.GetStatusRequest),
        ("/opentelemetry.proto.collector.trace.v1.TraceService/Export", ExportTraceServiceRequest),
    ),
    "prefill": (
        (_PACKAGE + "PrefillService/Prefill", prefill_pb2.PrefillRequest),
        (_PACKAGE + "WorkerService/Watch", worker_pb2.WatchRequest),
    ),
    "decode": (
        (_PACKAGE + "PageService/Push", page_pb2.PushRequest),
        (_PACKAGE + "DecodeService/Decode", decode_pb2.DecodeRequest),
        (_PACKAGE + "DecodeService/Subscribe", decode_pb2.SubscribeRequest),
    ),
}


@dataclass(frozen=True, slots=True)
class Door:
    """A port that strangers reach."""

    kind: str  # router, prefill, decode: gRPC; http
    address: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


_SIGNED = (-1, 0, 5, 2**31 - 1, -(2**31))
_UNSIGNED = (0, 1, 2, 15, 16, 17, 300, 321, 2**31, 2**32 - 1)
_TYPES = FieldDescriptor
_SCALARS: Mapping[int, Sequence[object]] = {
    _TYPES.TYPE_STRING: ("", "a", "\0", "é" * 300, "127.0.0.1:1", "x" * 5000),
    _TYPES.TYPE_BYTES: (b"", b"\1", b"ticket, 16 bytes", b"salt" * 1024),
    _TYPES.TYPE_BOOL: (False, True),
    _TYPES.TYPE_DOUBLE: (0.0, -1.0, 1e308, float("nan"), float("inf"), 0.7),
    _TYPES.TYPE_FLOAT: (0.0, -1.0, 1e38, float("nan"), float("-inf"), 0.7),
    _TYPES.TYPE_ENUM: (0, 1, 2, 3, 99, 2**31 - 1),
} | dict.fromkeys((_TYPES.TYPE_SINT32, _TYPES.TYPE_INT32, _TYPES.TYPE_SINT64, _TYPES.TYPE_INT64), _SIGNED)


def fill(message: Message, draws: random.Random, depth: int = 0) -> Message:
    """Set some fields to what may be wrong."""
    for field in message.DESCRIPTOR.fields:
        if draws.random() < 0.35 or (depth > 6 and field.message_type):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field.message_type.fields_by_name, draws, depth)
            continue
        if field.message_type is not None:
            value = getattr(message, field.name)
            for item in [value.add() for _ in range(draws.randrange(3))] if field.is_repeated else [value]:
                item.SetInParent()
                fill(item, draws, depth + 1)
            continue
        values = _SCALARS.get(field.type, _UNSIGNED)
        if field.is_repeated:
            getattr(message, field.name).extend(draws.choices(values, k=draws.choice((0, 1, 5, 40))))
        else:
            setattr(message, field.name, draws.choice(values))
    return message


def _fill_map(entries: Any, fields: Mapping[str, FieldDescriptor], draws: random.Random, depth: int) -> None:
    for key in draws.choices(_SCALARS.get(fields["key"].type, _UNSIGNED), k=draws.randrange(3)):
        if fields["value"].message_type is not None:
            fill(entries[key], draws, depth + 1)
        else:
            entries[key] = draws.choice(_SCALARS.get(fields["value"].type, _UNSIGNED))


def random_bytes(draws: random.Random, door: Door) -> bytes:
    return draws.randbytes(draws.choice((1, 9, 24, 500, 70_000)))


def broken_frames(draws: random.Random, door: Door) -> bytes:
    """HTTP/2 that begins well and goes on at random."""
    frames = (
        frame(draws.randrange(12), draws.randrange(256), draws.choice((0, 1, 2, 3, 2**31)), draws.randbytes(size))
        for size in draws.choices((0, 4, 5, 8, 100, 20_000), k=draws.randrange(1, 8))
    )
    return BEGINNING + b"".join(frames)


def wrong_fields(draws: random.Random, door: Door) -> bytes:
    """A call whose message is well formed, or almost, and makes no sense."""
    method, kind = draws.choice(METHODS[door.kind])
    body = fill(kind(), draws).SerializeToString()
    if draws.random() < 0.2:
        body = draws.randbytes(draws.choice((1, 40, 3000))) if draws.random() < 0.5 else body[: len(body) // 2]
    return call(method, body)


def huge_metadata(draws: random.Random, door: Door) -> bytes:
    method, kind = draws.choice(METHODS[door.kind])
    size = draws.choice((5_000, 20_000, 200_000, 200_000, 2_000_000))
    extra = [("x-long", "a" * size)] if draws.random() < 0.5 else [(f"x-{n}", "b" * 50) for n in range(size // 50)]
    return call(method, kind().SerializeToString(), extra, acknowledged=draws.random() < 0.5)


def half_open(draws: random.Random, door: Door) -> bytes:
    """What a client sends before it falls silent."""
    method, kind = draws.choice(METHODS[door.kind])
    begun = call(method, fill(kind(), draws).SerializeToString(), ended=False)
    return draws.choice((b"", PREFACE[:7], PREFACE, begun[: len(begun) - 3], begun))


def bad_http(draws: random.Random, door: Door) -> bytes:
    """Requests to the HTTP port."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return draws.choice(
        (
            draws.randbytes(200),
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 3000 + b"\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
            post + b'content-length: 9\r\n\r\n{"prompt"',
            post + b"content-length: 2\r\n\r\n{}",
            post + b"content-length: 100000\r\n\r\n{",
            post + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
            b"\r\n\r\n\r\n",
        )
    )


def half_http(draws: random.Random, door: Door) -> bytes:
    return draws.choice((b"", b"GET / HT", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le"))


_OF_GRPC = (random_bytes, broken_frames, wrong_fields, wrong_fields, huge_metadata, half_open)
KINDS = dict.fromkeys(METHODS, _OF_GRPC) | {"http": (random_bytes, bad_http, bad_http, half_http)}


class Flood:
    """Makes connections; `outcomes` counts how they ended: by kind, and statuses of calls by number."""

    def __init__(self, doors: Sequence[Door], seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._doors = doors
        self._draws = random.Random(seed)

    async def run(self, number: int, per_second: float) -> None:
        """So many connections, at a steady rate whatever becomes of them; back when all are closed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for index in range(number):
                await asyncio.sleep(began + index / per_second - loop.time())
                tasks.create_task(self._connection())

    async def _connection(self) -> None:
        door = self._draws.choice(self._doors)
        make = self._draws.choice(KINDS[door.kind])
        name = f"{make.__name__} to {door.kind}"
        data, resets = make(self._draws, door), self._draws.random() < 0.3
        try:
            reader, writer = await door.connect()
        except OSError as error:
            self.outcomes[f"{name}: not connected, {error}"] += 1
            return
        try:
            writer.write(data)
            patience_s = HOLD_S if make in (half_open, half_http) else ANSWER_S
            self.outcomes[f"{name}: {await _answer(reader, patience_s)}"] += 1
        finally:
            if resets:
                writer.transport.abort()
            else:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader, patience_s: float) -> str:
    """What the server did: a status, an end, or nothing for that long."""
    heard = b""
    try:
        async with asyncio.timeout(patience_s):
            while data := await reader.read(65536):
                heard = heard[-100:] + data
                if found := _STATUS.search(heard):
                    return f"status {found[1].decode()}"
                if heard.startswith(b"HTTP/1.1 "):
                    return f"status {heard[9:12].decode()}"
    except TimeoutError:
        return "no end"
    except OSError:
        pass
    return "closed"
