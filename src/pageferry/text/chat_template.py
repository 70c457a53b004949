"""A model's chat template, rendered by a process of its own: see `template_process`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Lock
from typing import Any

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError

_HOW_TO_SET = (
    "put a chat template into tokenizer_config.json or chat_template.jinja of the model's directory "
    "(tokenizer.chat_template of a GGUF file), name a file of one with router.chat_template, or send a prompt instead "
    "of a chat"
)
_SCRIPT = Path(__file__).with_name("template_process.py")
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # nothing else of the router's, which has secrets in it
_PATIENCE_S = 60.0  # for a process that neither answers nor dies; one that computes too long dies by itself
_ALWAYS_SET = {"add_generation_prompt": True, "tools": None, "documents": None}  # as transformers does
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
_TOO_MUCH = "takes more processor time or memory than a template may"

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders conversations. A template that is missing or broken is an error of each chat, not of the start."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`tool_source` is what chats with tools are rendered by, where a model has another template for them."""
        job = {"source": source, "tool_source": tool_source, "special_tokens": dict(special_tokens)}
        self._job = None if source is None else job
        self._process: _Process | None = None
        self._ending: weakref.finalize[..., ChatTemplate] | None = None
        self._lock = Lock()
        self._executor = ThreadPoolExecutor(1, "chat-template")  # its own: a slow template holds up nothing but chats

    @cached_property
    def problem(self) -> str:
        """Why there is none; empty where there is one. The first call waits until it is compiled."""
        if self._job is None:
            return "the model has no chat template"
        with self._lock:
            try:
                problem = self._started().problem
            except _DiedError:
                problem = _TOO_MUCH
        return f"the model's chat template {problem}" if problem else ""

    @property
    def takes_tools(self) -> bool:
        """Whether there is a word of tools in it: one without drops them."""
        if self._job is None:
            return False
        return self._job["tool_source"] is not None or "tools" in str(self._job["source"])

    async def render_async(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """As `render`, without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.render, messages, variables)

    def render(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """The text up to where the answer begins, unless `variables` have `add_generation_prompt` false.

        Raises FailedPreconditionError without a template, InvalidArgumentError where the template refuses.
        """
        if self.problem:
            raise FailedPreconditionError(f"{self.problem}; {_HOW_TO_SET}", reason="NO_CHAT_TEMPLATE")
        values = {**_ALWAYS_SET, **(variables or {}), "messages": [dict(message) for message in messages]}
        with self._lock:
            reply = self._ask(values)
        if "refused" in reply:
            message = f"chat does not suit the model's chat template: {reply['refused']}"
            raise InvalidArgumentError(message, reason="CHAT_REFUSED")
        if "text" not in reply:
            # The template's own mistake; what it says could hold text of the request.
            message = f"the model's chat template fails on this chat ({reply['failed']}); {_HOW_TO_SET}"
            raise FailedPreconditionError(message, reason="CHAT_TEMPLATE_FAILED")
        return reply["text"]

    def _ask(self, values: Mapping[str, object]) -> dict[str, str]:
        """One that somebody else has ended is started anew, once."""
        for _ in range(2):
            try:
                return self._started().ask(values)
            except _DiedError as error:
                if error.by_itself:
                    break
        return {"failed": _TOO_MUCH}

    def _started(self) -> "_Process":
        assert self._job is not None
        if self._process is None or self._process.is_over:
            self._process = _Process(self._job)
            if self._ending is not None:
                self._ending.detach()
            self._ending = weakref.finalize(self, self._process.end)
        return self._process


class _DiedError(Exception):
    """The process is over; `by_itself`: for what it was asked to do, not since somebody killed it."""

    def __init__(self, *, by_itself: bool) -> None:
        super().__init__()
        self.by_itself = by_itself


class _Process:
    """A running template process, to which one thread at a time talks."""

    def __init__(self, job: Mapping[str, object]) -> None:
        """Waits until the template is compiled; raises _DiedError where that takes too much."""
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what it could say there might hold text of a request
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        self.is_over = False
        self.problem = self.ask(job).get("problem", "")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: Mapping[str, object]) -> dict[str, str]:
        is_stuck = False
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            if self._connection.poll(_PATIENCE_S):
                reply: dict[str, str] = json.loads(self._connection.recv_bytes())
                return reply
            is_stuck = True
        except (EOFError, OSError):
            pass
        raise _DiedError(by_itself=self.end() not in _KILLED or is_stuck)

    def end(self) -> int:
        """Its exit status; idempotent."""
        self.is_over = True
        self._connection.close()
        self._process.kill()
        return self._process.wait()
