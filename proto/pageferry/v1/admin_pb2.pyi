from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("open_calls", "drained")
    OPEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    open_calls: int
    drained: Drained
    def __init__(self, open_calls: _Optional[int] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("ended_calls",)
    ENDED_CALLS_FIELD_NUMBER: _ClassVar[int]
    ended_calls: int
    def __init__(self, ended_calls: _Optional[int] = ...) -> None: ...
