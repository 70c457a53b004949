from pageferry.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PromptSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROMPT_SOURCE_UNSPECIFIED: _ClassVar[PromptSource]
    PROMPT_SOURCE_PUSHED: _ClassVar[PromptSource]
    PROMPT_SOURCE_LOCAL: _ClassVar[PromptSource]
PROMPT_SOURCE_UNSPECIFIED: PromptSource
PROMPT_SOURCE_PUSHED: PromptSource
PROMPT_SOURCE_LOCAL: PromptSource

class DecodeRequest(_message.Message):
    __slots__ = ("work", "source", "subscription", "call")
    WORK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    work: _types_pb2.WorkItem
    source: PromptSource
    subscription: bytes
    call: int
    def __init__(self, work: _Optional[_Union[_types_pb2.WorkItem, _Mapping]] = ..., source: _Optional[_Union[PromptSource, str]] = ..., subscription: _Optional[bytes] = ..., call: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("reserved", "tokens", "completed")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    tokens: Tokens
    completed: Completed
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("ticket", "kv_endpoint", "cached_tokens", "layout", "cached_pages", "subscribed")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    kv_endpoint: str
    cached_tokens: int
    layout: _types_pb2.PageLayout
    cached_pages: int
    subscribed: bool
    def __init__(self, ticket: _Optional[bytes] = ..., kv_endpoint: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ..., cached_pages: _Optional[int] = ..., subscribed: _Optional[bool] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens", "prompt_logprobs", "first_steps")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.GeneratedToken]
    prompt_logprobs: _types_pb2.PromptLogprobs
    first_steps: FirstSteps
    def __init__(self, tokens: _Optional[_Iterable[_Union[_types_pb2.GeneratedToken, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., first_steps: _Optional[_Union[FirstSteps, _Mapping]] = ...) -> None: ...

class FirstSteps(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "first_step_ms", "cached_tokens")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    first_step_ms: float
    cached_tokens: int
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., first_step_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("reason", "queue_ms", "prefill_ms", "steps", "preemptions", "cached_tokens", "first_step_ms", "drafted", "accepted", "hypotheses")
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    queue_ms: float
    prefill_ms: float
    steps: int
    preemptions: int
    cached_tokens: int
    first_step_ms: float
    drafted: int
    accepted: int
    hypotheses: _containers.RepeatedCompositeFieldContainer[_types_pb2.Hypothesis]
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., first_step_ms: _Optional[float] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., hypotheses: _Optional[_Iterable[_Union[_types_pb2.Hypothesis, _Mapping]]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: bytes
    def __init__(self, subscription: _Optional[bytes] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[CallEvents]
    def __init__(self, calls: _Optional[_Iterable[_Union[CallEvents, _Mapping]]] = ...) -> None: ...

class CallEvents(_message.Message):
    __slots__ = ("call", "tokens", "completed", "failed", "prompt_logprobs", "first_steps")
    CALL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_FIELD_NUMBER: _ClassVar[int]
    call: int
    tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.GeneratedToken]
    completed: Completed
    failed: bool
    prompt_logprobs: _types_pb2.PromptLogprobs
    first_steps: FirstSteps
    def __init__(self, call: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_types_pb2.GeneratedToken, _Mapping]]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., failed: _Optional[bool] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., first_steps: _Optional[_Union[FirstSteps, _Mapping]] = ...) -> None: ...
