from pageferry.v1 import inference_pb2 as _inference_pb2
from pageferry.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("incarnation", "sequence", "snapshot", "load", "cache", "draining")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    sequence: int
    snapshot: Snapshot
    load: _inference_pb2.WorkerLoad
    cache: CacheEvents
    draining: Draining
    def __init__(self, incarnation: _Optional[bytes] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., load: _Optional[_Union[_inference_pb2.WorkerLoad, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("role", "layout", "model", "max_num_seqs", "max_model_tokens", "load", "cached_hashes", "draining", "chunk_tokens", "subscriptions")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHED_HASHES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    layout: _types_pb2.PageLayout
    model: str
    max_num_seqs: int
    max_model_tokens: int
    load: _inference_pb2.WorkerLoad
    cached_hashes: bytes
    draining: bool
    chunk_tokens: int
    subscriptions: bool
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ..., model: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_model_tokens: _Optional[int] = ..., load: _Optional[_Union[_inference_pb2.WorkerLoad, _Mapping]] = ..., cached_hashes: _Optional[bytes] = ..., draining: _Optional[bool] = ..., chunk_tokens: _Optional[int] = ..., subscriptions: _Optional[bool] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("stored", "removed")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    removed: bytes
    def __init__(self, stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
