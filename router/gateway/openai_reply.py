"""What the HTTP gateway answers: OpenAI's objects, built from the events of a generation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pageferry.core.errors import FailedPreconditionError, PageferryError, ResourceExhaustedError
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]

_FINISH_REASONS = {types.FINISH_REASON_STOP: "stop", types.FINISH_REASON_LENGTH: "length"}
# How fields of the contract begin, and what a body has in that place.
_BODY_FIELDS = {
    "stop_strings": "stop",
    "stop.": "",
    "chat.messages": "messages",
    "chat": "messages",
    "token_ids": "prompt",
}


@dataclass(slots=True)
class Reply:
    """The objects of one answer; `token_bytes` gives a token's own bytes, for log-probabilities."""

    started: pb.Started
    created: int  # Unix seconds
    chat: bool
    token_bytes: TokenBytes
    text_offset: int = 0  # characters of the tokens whose log-probabilities were reported

    def whole(self, text: str, tokens: Sequence[types.GeneratedToken], finished: pb.Finished) -> Json:
        """The one object of an answer that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice: Json = {
            "index": 0,
            **({"message": message} if self.chat else {"text": text}),
            "logprobs": self._logprobs(tokens),
            "finish_reason": _FINISH_REASONS[finished.reason],
        }
        kind = "chat.completion" if self.chat else "text_completion"
        return self._envelope(kind, [choice]) | {"usage": usage(finished.usage)}

    def opening(self) -> Json | None:
        """The chunk that opens a streamed chat answer and names the role; completions have none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.chat else None

    def delta(self, delta: pb.Delta) -> Json | None:
        """The chunk for more output; None where there is nothing to tell yet."""
        logprobs = self._logprobs(delta.tokens)
        if not delta.text and logprobs is None:
            return None
        return self._chunk({"delta": {"content": delta.text}} if self.chat else {"text": delta.text}, logprobs)

    def closing(self, finished: pb.Finished) -> Json:
        """The chunk that carries the finish reason."""
        return self._chunk({"delta": {}} if self.chat else {"text": ""}, None, _FINISH_REASONS[finished.reason])

    def usage_chunk(self, finished: pb.Finished) -> Json:
        """The last chunk where stream_options.include_usage was set."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._envelope(kind, []) | {"usage": usage(finished.usage)}

    def _chunk(self, content: Json, logprobs: Json | None, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.started.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.started.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[types.GeneratedToken]) -> Json | None:
        reported = [token.logprobs for token in tokens if token.HasField("logprobs")]
        if not reported:
            return None
        return self._chat_logprobs(reported) if self.chat else self._completion_logprobs(reported)

    def _chat_logprobs(self, reported: list[types.Logprobs]) -> Json:
        content = [
            self._chat_token(entry.sampled) | {"top_logprobs": [self._chat_token(token) for token in entry.top]}
            for entry in reported
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token: types.TokenLogprob) -> Json:
        data = self.token_bytes(token.token_id)
        return {"token": _token_name(data), "logprob": _finite(token.logprob), "bytes": list(data)}

    def _name(self, token: types.TokenLogprob) -> str:
        return _token_name(self.token_bytes(token.token_id))

    def _completion_logprobs(self, reported: list[types.Logprobs]) -> Json:
        tokens = [self._name(entry.sampled) for entry in reported]
        offsets = []
        for text in tokens:
            offsets.append(self.text_offset)
            self.text_offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.sampled.logprob) for entry in reported],
            "top_logprobs": [{self._name(token): _finite(token.logprob) for token in entry.top} for entry in reported],
            "text_offset": offsets,
        }


def _token_name(data: bytes) -> str:
    """A token's text, or, where it is no whole characters, its bytes in the form that OpenAI writes them."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage(counts: types.Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def models(response: pb.ListModelsResponse, created: int) -> Json:
    """The list of GET /v1/models."""
    return {"object": "list", "data": [model(entry, created) for entry in response.models]}


def model(entry: pb.Model, created: int) -> Json:
    """One model."""
    return {
        "id": entry.name,
        "object": "model",
        "created": created,
        "owned_by": "pageferry",
        "max_model_len": entry.max_model_tokens,
    }


def error_status(error: PageferryError) -> int:
    """The HTTP status: as the class says, but for what only a changed request or server setting can mend."""
    if isinstance(error, FailedPreconditionError):
        return 400
    if isinstance(error, ResourceExhaustedError) and error.retry_after_ms is None:
        return 413  # over a size limit; a 429 would make clients send it again
    return error.http_status


def error_body(error: PageferryError) -> Json:
    """OpenAI's error object; the same in a response and in a stream's event."""
    status = error_status(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    message, param = error.message, None
    if error.violations:
        field = error.violations[0].field
        param = _body_field(field)
        if message.startswith(field):
            message = param + message.removeprefix(field)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}


def _body_field(field: str) -> str:
    """The name that a field of the contract has in a body."""
    return next((new + field.removeprefix(old) for old, new in _BODY_FIELDS.items() if field.startswith(old)), field)


def _finite(logprob: float) -> float | None:
    """JSON has no infinities: a token that can't be drawn has null."""
    return logprob if math.isfinite(logprob) else None
