from pageferry.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PageKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_KIND_UNSPECIFIED: _ClassVar[PageKind]
    PAGE_KIND_PAGE: _ClassVar[PageKind]
    PAGE_KIND_TAIL: _ClassVar[PageKind]
PAGE_KIND_UNSPECIFIED: PageKind
PAGE_KIND_PAGE: PageKind
PAGE_KIND_TAIL: PageKind

class PushRequest(_message.Message):
    __slots__ = ("open", "frame", "keep_alive", "commit", "frames", "staged", "attached")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    open: Open
    frame: PageFrame
    keep_alive: KeepAlive
    commit: Commit
    frames: PageFrames
    staged: StagedPages
    attached: StagingAttached
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., frame: _Optional[_Union[PageFrame, _Mapping]] = ..., keep_alive: _Optional[_Union[KeepAlive, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., frames: _Optional[_Union[PageFrames, _Mapping]] = ..., staged: _Optional[_Union[StagedPages, _Mapping]] = ..., attached: _Optional[_Union[StagingAttached, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("ticket", "layout", "staging", "request_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    layout: _types_pb2.PageLayout
    staging: StagingRequest
    request_id: str
    def __init__(self, ticket: _Optional[bytes] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ..., staging: _Optional[_Union[StagingRequest, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class StagingRequest(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class StagingOffer(_message.Message):
    __slots__ = ("name", "nonce", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    nonce: bytes
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class StagingAttached(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class PageFrame(_message.Message):
    __slots__ = ("group", "page_index", "first_layer", "num_layers", "crc32c", "kind", "payload")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    group: int
    page_index: int
    first_layer: int
    num_layers: int
    crc32c: int
    kind: PageKind
    payload: bytes
    def __init__(self, group: _Optional[int] = ..., page_index: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., crc32c: _Optional[int] = ..., kind: _Optional[_Union[PageKind, str]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PageFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[PageFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[PageFrame, _Mapping]]] = ...) -> None: ...

class StagedPages(_message.Message):
    __slots__ = ("group", "kind", "page_indexes", "offset", "crc32c")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: PageKind
    page_indexes: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    crc32c: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[_Union[PageKind, str]] = ..., page_indexes: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., crc32c: _Optional[_Iterable[int]] = ...) -> None: ...

class KeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Commit(_message.Message):
    __slots__ = ("covered_tokens", "first_tokens", "crc32c")
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    covered_tokens: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstDraw]
    crc32c: int
    def __init__(self, covered_tokens: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstDraw, _Mapping]]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class FirstDraw(_message.Message):
    __slots__ = ("choice", "token")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token: _types_pb2.GeneratedToken
    def __init__(self, choice: _Optional[int] = ..., token: _Optional[_Union[_types_pb2.GeneratedToken, _Mapping]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("opened", "acked", "committed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    acked: Acked
    committed: Committed
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., acked: _Optional[_Union[Acked, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("lease_ms", "takes_frames", "staging")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TAKES_FRAMES_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    takes_frames: bool
    staging: StagingOffer
    def __init__(self, lease_ms: _Optional[int] = ..., takes_frames: _Optional[bool] = ..., staging: _Optional[_Union[StagingOffer, _Mapping]] = ...) -> None: ...

class Acked(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    def __init__(self, frames: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...
