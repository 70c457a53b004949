from pageferry.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls_json", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls_json: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools_json", "template_variables_json", "continue_last")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    template_variables_json: str
    continue_last: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., template_variables_json: _Optional[str] = ..., continue_last: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "chat", "token_ids", "sampling", "stop", "stop_strings", "priority", "skip_special_tokens", "n", "best_of", "beam", "echo", "profile", "bad_words")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    chat: ChatMessages
    token_ids: TokenIds
    sampling: _types_pb2.SamplingParams
    stop: _types_pb2.StopConditions
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    skip_special_tokens: bool
    n: int
    best_of: int
    beam: _types_pb2.BeamSearch
    echo: bool
    profile: str
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam: _Optional[_Union[_types_pb2.BeamSearch, _Mapping]] = ..., echo: _Optional[bool] = ..., profile: _Optional[str] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished", "choice_finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    choice_finished: ChoiceFinished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., choice_finished: _Optional[_Union[ChoiceFinished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "trace_id", "model", "prompt_tokens", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    model: str
    prompt_tokens: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "tokens", "choice", "prompt_logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.GeneratedToken]
    choice: int
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[_types_pb2.GeneratedToken, _Mapping]]] = ..., choice: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class ChoiceFinished(_message.Message):
    __slots__ = ("choice", "reason", "matched_stop", "score")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: _types_pb2.FinishReason
    matched_stop: str
    score: float
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "matched_stop", "usage", "timings", "pages")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    matched_stop: str
    usage: _types_pb2.Usage
    timings: Timings
    pages: HandoffStats
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., pages: _Optional[_Union[HandoffStats, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("tokenize_ms", "queue_ms", "reserve_ms", "prefill_queue_ms", "prefill_ms", "delivery_ms", "ttft_ms", "transfer_tail_ms", "decode_queue_ms", "total_ms")
    TOKENIZE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TAIL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    tokenize_ms: float
    queue_ms: float
    reserve_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    delivery_ms: float
    ttft_ms: float
    transfer_tail_ms: float
    decode_queue_ms: float
    total_ms: float
    def __init__(self, tokenize_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., reserve_ms: _Optional[float] = ..., prefill_queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., delivery_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., transfer_tail_ms: _Optional[float] = ..., decode_queue_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class HandoffStats(_message.Message):
    __slots__ = ("format", "shipped", "cached", "bytes", "hidden", "page_format")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    format: _types_pb2.PageFormat
    shipped: int
    cached: int
    bytes: int
    hidden: float
    page_format: str
    def __init__(self, format: _Optional[_Union[_types_pb2.PageFormat, str]] = ..., shipped: _Optional[int] = ..., cached: _Optional[int] = ..., bytes: _Optional[int] = ..., hidden: _Optional[float] = ..., page_format: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatMessages
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "pieces")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_model_tokens", "vocab_size", "ready")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_tokens: int
    vocab_size: int
    ready: bool
    def __init__(self, name: _Optional[str] = ..., max_model_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., ready: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("workers", "queued", "running", "profiles", "draining")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    queued: int
    running: int
    profiles: _containers.RepeatedCompositeFieldContainer[ProfileStatus]
    draining: bool
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., profiles: _Optional[_Iterable[_Union[ProfileStatus, _Mapping]]] = ..., draining: _Optional[bool] = ...) -> None: ...

class ProfileStatus(_message.Message):
    __slots__ = ("name", "in_effect", "queued", "running")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IN_EFFECT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    in_effect: str
    queued: int
    running: int
    def __init__(self, name: _Optional[str] = ..., in_effect: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("role", "address", "state", "reason", "load", "layout", "incarnation")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    state: str
    reason: str
    load: WorkerLoad
    layout: _types_pb2.PageLayout
    incarnation: str
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("trace_id", "traces_data")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    TRACES_DATA_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    traces_data: bytes
    def __init__(self, trace_id: _Optional[str] = ..., traces_data: _Optional[bytes] = ...) -> None: ...

class PoolLoad(_message.Message):
    __slots__ = ("group", "pages_total", "pages_free", "pages_cached", "pages_reserved", "pages_resident", "pages_promised")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_PROMISED_FIELD_NUMBER: _ClassVar[int]
    group: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reserved: int
    pages_resident: int
    pages_promised: int
    def __init__(self, group: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_reserved: _Optional[int] = ..., pages_resident: _Optional[int] = ..., pages_promised: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("pages_total", "pages_free", "pages_cached", "pages_reserved", "pages_resident", "waiting", "running", "tickets", "queued_prompt_tokens", "prefill_tokens_per_s", "step_s", "preemptions", "generated_tokens", "prefill_tokens", "pools", "stalled", "least_priority", "priorities", "handoffs", "handoff_pages", "handoff_bytes", "handoff_failures")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    LEAST_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_PAGES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FAILURES_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reserved: int
    pages_resident: int
    waiting: int
    running: int
    tickets: int
    queued_prompt_tokens: int
    prefill_tokens_per_s: float
    step_s: float
    preemptions: int
    generated_tokens: int
    prefill_tokens: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolLoad]
    stalled: bool
    least_priority: int
    priorities: _containers.RepeatedCompositeFieldContainer[PriorityLoad]
    handoffs: int
    handoff_pages: int
    handoff_bytes: int
    handoff_failures: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_reserved: _Optional[int] = ..., pages_resident: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., tickets: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolLoad, _Mapping]]] = ..., stalled: _Optional[bool] = ..., least_priority: _Optional[int] = ..., priorities: _Optional[_Iterable[_Union[PriorityLoad, _Mapping]]] = ..., handoffs: _Optional[int] = ..., handoff_pages: _Optional[int] = ..., handoff_bytes: _Optional[int] = ..., handoff_failures: _Optional[int] = ...) -> None: ...

class PriorityLoad(_message.Message):
    __slots__ = ("priority", "waiting", "queued_prompt_tokens")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    waiting: int
    queued_prompt_tokens: int
    def __init__(self, priority: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ...) -> None: ...
