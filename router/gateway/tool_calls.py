"""Calls of tools in a text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write them."""

import json
import secrets
from collections.abc import Callable

from pageferry.router.gateway.strict_json import Json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCallReader:
    """Parts calls from the rest of a text that comes bit by bit. What is no call after all stays text."""

    def __init__(self, draw_id: Callable[[], str] = lambda: secrets.token_hex(12)) -> None:
        self._held = ""
        self._is_after_call = False  # spaces and line ends there are no text
        self._draw_id = draw_id

    def push(self, text: str) -> tuple[str, list[Json]]:
        """The text that is certainly none, and the calls that are complete."""
        self._held += text
        parts: list[str] = []
        calls: list[Json] = []
        self._skip_spaces()
        while (start := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, start)
            if end < 0:
                parts.append(self._held[:start])
                self._held = self._held[start:]
                return "".join(parts), calls
            call = self._call(self._held[start + len(_OPEN) : end])
            end += len(_CLOSE)
            parts.append(self._held[: end if call is None else start])
            self._held = self._held[end:]
            if call is not None:
                calls.append(call)
                self._is_after_call = True
                self._skip_spaces()
        keep = _overlap(self._held)
        cut = len(self._held) - keep
        parts.append(self._held[:cut])
        self._held = self._held[cut:]
        return "".join(parts), calls

    def finish(self) -> tuple[str, list[Json]]:
        """What was held; a call whose closing tag did not come counts where it is whole."""
        held, self._held = self._held, ""
        call = self._call(held.removeprefix(_OPEN)) if held.startswith(_OPEN) else None
        return (held, []) if call is None else ("", [call])

    def _skip_spaces(self) -> None:
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held

    def _call(self, text: str) -> Json | None:
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                return None
            arguments = value.get("arguments", value.get("parameters", {}))
            if not isinstance(arguments, dict):
                return None
            function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
            "".join(function.values()).encode()  # halves of surrogate pairs could not be sent
        except (ValueError, RecursionError):
            return None
        return {"id": f"call_{self._draw_id()}", "type": "function", "function": function}


def _overlap(text: str) -> int:
    """Characters at the end that may be the beginning of a tag."""
    return next((size for size in range(min(len(_OPEN) - 1, len(text)), 0, -1) if _OPEN.startswith(text[-size:])), 0)
