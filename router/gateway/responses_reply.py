"""The answer of /v1/responses: one response object, or the events by which it grows."""

import secrets

from pageferry.core.errors import PageferryError
from pageferry.router.gateway.errors import error_body
from pageferry.router.gateway.logprobs import TokenBytes, chat_entries, reported
from pageferry.router.gateway.parsed import Parsed
from pageferry.router.gateway.reply import Choice, end_of
from pageferry.router.gateway.strict_json import Json
from pageferry.router.gateway.tool_calls import ToolCallReader
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

_DEFAULTS: Json = {
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": False,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}


class ResponsesReply:
    done = b""  # its last event says it

    def __init__(self, parsed: Parsed, request_id: str, created: int, token_bytes: TokenBytes) -> None:
        self._parsed = parsed
        self._base = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created,
            **_DEFAULTS,
            **(parsed.details or {}),
        }
        self._token_bytes = token_bytes
        self._choice = Choice(0, ToolCallReader() if parsed.calls else None)
        self._message: Json | None = None  # the item that is growing
        self._part_text: list[str] = []
        self._part_logprobs: list[Json] = []
        self._output: list[Json] = []
        self._num_events = 0

    def take(self, prompt: int, event: pb.GenerateResponse) -> list[Json]:
        """One generation, without choices."""
        match event.WhichOneof("event"):
            case "started":
                self._base["model"] = event.started.model
                return []
            case "delta":
                entries = chat_entries(reported(event.delta.tokens), self._token_bytes)
                return [*self._opening(), *self._grow(*self._choice.push(event.delta.text), entries)]
            case "finished":
                return self._finish(event.finished)
            case _:
                return []

    def closing(self) -> list[Json]:
        return []

    def whole(self) -> Json:
        return self._base

    def failed(self, error: PageferryError) -> Json:
        told = error_body(error)["error"]
        self._base |= {"status": "failed", "error": {"code": told["code"], "message": told["message"]}}
        return self._event("response.failed", response=self._base | {"output": self._output, "usage": None})

    def _opening(self) -> list[Json]:
        if self._num_events:
            return []
        begun = self._base | {"status": "in_progress", "output": [], "usage": None}
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def _finish(self, finished: pb.Finished) -> list[Json]:
        events = [*self._opening(), *self._grow(*self._choice.finish(end_of(finished)), [])]
        if not self._output and self._message is None:
            events += self._open_message()  # an answer without text is one, too
        is_complete = finished.reason == types.FINISH_REASON_STOP
        events += self._close_message("completed" if is_complete else "incomplete")
        self._base |= {"output": self._output, "usage": _usage(finished.usage)}
        if is_complete:
            self._base["status"] = "completed"
            return [*events, self._event("response.completed", response=self._base)]
        why = "repetition" if finished.reason == types.FINISH_REASON_REPETITION else "max_output_tokens"
        self._base |= {"status": "incomplete", "incomplete_details": {"reason": why}}
        return [*events, self._event("response.incomplete", response=self._base)]

    def _grow(self, text: str, calls: list[Json], logprobs: list[Json]) -> list[Json]:
        events: list[Json] = []
        self._part_logprobs += logprobs
        if text and not (calls and self._message is None and not text.strip()):
            if self._message is None:
                events += self._open_message()
            self._part_text.append(text)
            events.append(self._part_event("output_text.delta", delta=text, logprobs=logprobs))
        for call in calls:
            events += self._close_message("completed")
            events += self._call(call)
        return events

    def _open_message(self) -> list[Json]:
        self._message = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        item = self._message | {"status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return [added, self._part_event("content_part.added", part=self._part())]

    def _close_message(self, status: str) -> list[Json]:
        if self._message is None:
            return []
        part = self._part()
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        events = [self._part_event("output_text.done", **done), self._part_event("content_part.done", part=part)]
        item = self._message | {"status": status, "content": [part]}
        events.append(self._add_item(item))
        self._message, self._part_text, self._part_logprobs = None, [], []
        return events

    def _call(self, call: Json) -> list[Json]:
        function, index = call["function"], len(self._output)
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call["id"]} | function
        place = {"item_id": item["id"], "output_index": index}
        name, arguments = "response.function_call_arguments", function["arguments"]
        begun = item | {"status": "in_progress", "arguments": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"{name}.delta", **place, delta=arguments),
            self._event(f"{name}.done", **place, name=function["name"], arguments=arguments),
            self._add_item(item | {"status": "completed"}),
        ]

    def _add_item(self, item: Json) -> Json:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _part(self) -> Json:
        text, logprobs = "".join(self._part_text), list(self._part_logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _part_event(self, name: str, **values: object) -> Json:
        assert self._message is not None
        place = {"item_id": self._message["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{name}", **place, **values)

    def _event(self, kind: str, /, **values: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}


def _usage(counts: types.Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
