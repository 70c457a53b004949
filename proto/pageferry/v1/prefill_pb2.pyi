from pageferry.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("work", "target")
    WORK_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    work: _types_pb2.WorkItem
    target: HandoffTarget
    def __init__(self, work: _Optional[_Union[_types_pb2.WorkItem, _Mapping]] = ..., target: _Optional[_Union[HandoffTarget, _Mapping]] = ...) -> None: ...

class HandoffTarget(_message.Message):
    __slots__ = ("ticket", "kv_endpoint", "cached_tokens", "layout")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    kv_endpoint: str
    cached_tokens: int
    layout: _types_pb2.PageLayout
    def __init__(self, ticket: _Optional[bytes] = ..., kv_endpoint: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "first_token", "shipped")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_token: FirstToken
    shipped: Shipped
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., shipped: _Optional[_Union[Shipped, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "finish_reason", "queue_ms", "prefill_ms", "cached_tokens", "prompt_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: _types_pb2.GeneratedToken
    finish_reason: _types_pb2.FinishReason
    queue_ms: float
    prefill_ms: float
    cached_tokens: int
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, token: _Optional[_Union[_types_pb2.GeneratedToken, _Mapping]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class Shipped(_message.Message):
    __slots__ = ("pages", "bytes", "tail_ms", "in_flight_ms")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_MS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_MS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    bytes: int
    tail_ms: float
    in_flight_ms: float
    def __init__(self, pages: _Optional[int] = ..., bytes: _Optional[int] = ..., tail_ms: _Optional[float] = ..., in_flight_ms: _Optional[float] = ...) -> None: ...
