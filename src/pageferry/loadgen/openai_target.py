"""A server of OpenAI's completions or chat completions, streamed: bare aiohttp, one small parse an event."""

import json
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NoReturn

import aiohttp

from pageferry.core.errors import FailedPreconditionError, NotFoundError, UnavailableError
from pageferry.loadgen.result import Target as TargetInfo
from pageferry.loadgen.target import Answer, Question, RequestFailedError, ServerLoad
from pageferry.runtime.tls import Certificates

_CHECK_TIMEOUT = aiohttp.ClientTimeout(total=10)
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=120)
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)
_KEPT_S = 3  # an idle connection; servers close them after 5 s or more, and one that closes meanwhile is a failure
_MAX_ERROR_CHARACTERS = 300
# Beyond OpenAI's own; each is left out where the server refuses it.
_OPTIONAL = ("min_tokens", "ignore_eos", "stream_options", "temperature")


class OpenAiTarget:
    """One connection a request in flight; they are kept and used again, unless each is to have a new one."""

    def __init__(
        self,
        url: str,
        *,
        chat: bool,
        model: str,
        api_key: str,
        temperature: float,
        extra_body: Mapping[str, Any],
        keep_connections: bool = True,
        certificates: Certificates | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._chat = chat
        self._path = f"{self._url}/{'chat/completions' if chat else 'completions'}"
        self._model = model
        self._extra_body = dict(extra_body)
        self._fields: dict[str, Any] = {
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "min_tokens": 0,
        }
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        kept: dict[str, Any] = {"keepalive_timeout": _KEPT_S} if keep_connections else {"force_close": True}
        if certificates is not None:
            kept["ssl"] = certificates.for_http_client()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **kept),
            headers=headers,
            timeout=_NO_TIMEOUT,
        )

    @property
    def info(self) -> TargetInfo:
        return TargetInfo("openai", self._url, self._model)

    async def prepare(self) -> list[str]:
        await self._find_model()
        refused: list[str] = []
        while (status := await self._probe())[0] != 200:
            named = [name for name in _OPTIONAL if name in self._fields and name in status[1]]
            left = named or [name for name in _OPTIONAL if name in self._fields]
            if status[0] not in (400, 422) or not left:
                raise FailedPreconditionError(f"{self._path} answers HTTP {status[0]}: {status[1]}")
            del self._fields[left[0]]
            refused.append(left[0])
        return [f"the target refuses {name}; requests go without it" for name in refused]

    async def ask(self, question: Question, answer: Answer) -> float:
        try:
            async with self._session.post(self._path, data=self._body(question)) as response:
                if response.status != 200:
                    raise RequestFailedError(f"HTTP {response.status}: {_error_text(await response.read())}")
                return await _read(response.content, answer)
        except aiohttp.ClientError as error:
            raise RequestFailedError(_problem(error)) from None

    async def server_load(self) -> ServerLoad | None:
        return None

    async def close(self) -> None:
        await self._session.close()

    async def _find_model(self) -> None:
        try:
            async with self._session.get(f"{self._url}/models", timeout=_CHECK_TIMEOUT) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"no server answers at {self._url}: {_problem(error)}") from None
        if status in (401, 403):
            raise FailedPreconditionError(f"{self._url}/models answers HTTP {status}; set --api-key")
        if self._model:
            return
        try:
            self._model = str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            problem = f"{self._url}/models names no model (HTTP {status}); does the URL end in /v1? Else set --model"
            raise NotFoundError(problem) from None

    async def _probe(self) -> tuple[int, str]:
        """Ask for one token; the status, and what an error says."""
        body = self._body(Question("Hello there", 2, 1))
        try:
            async with self._session.post(self._path, data=body, timeout=_PROBE_TIMEOUT) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"{self._path} does not answer: {_problem(error)}") from None
        return response.status, "" if response.status == 200 else _error_text(text)

    def _body(self, question: Question) -> bytes:
        fields = self._fields | {"model": self._model, "max_tokens": question.output_tokens}
        if "min_tokens" in fields:
            fields["min_tokens"] = question.output_tokens
        if question.seed is not None:
            fields["seed"] = question.seed
        if self._chat:
            fields["messages"] = [{"role": "user", "content": question.prompt}]
        else:
            fields["prompt"] = question.prompt
        return json.dumps(fields | self._extra_body).encode()


async def _read(content: aiohttp.StreamReader, answer: Answer) -> float:
    """The time of the last event of a stream of server-sent events."""
    rest = b""
    ended_s: float | None = None
    async for data in content.iter_any():
        now_s = perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and _take(line[5:].strip(), answer, now_s):
                ended_s = now_s
    if ended_s is None:
        raise RequestFailedError("the stream ended without a terminal event")
    return ended_s


def _take(payload: bytes, answer: Answer, now_s: float) -> bool:
    """Note one event; whether it is a terminal one: a choice's finish, the usage after it, or [DONE]."""
    if payload == b"[DONE]":
        return True
    try:
        event = json.loads(payload)
        if event.get("error") is not None:
            _fail_with(event["error"])
        if usage := event.get("usage"):
            _take_usage(usage, answer)
        choices = event.get("choices")
        if not choices:
            return False
        finished = choices[0].get("finish_reason") is not None
        if _carries_tokens(choices[0]) or (finished and not answer.num_pieces):  # an answer of special tokens only
            answer.take_piece(now_s)
        return finished
    except (ValueError, TypeError, AttributeError, LookupError):
        raise RequestFailedError("the stream holds an event that is no completion chunk") from None


def _carries_tokens(choice: dict[str, Any]) -> bool:
    """Whether it is a piece of output: any but the opening of a chat, which names the role, and a bare finish.

    One without text counts: its tokens are special ones, or part of a character.
    """
    text = choice.get("text")
    if text is None:
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if not text and ("role" in delta or "content" not in delta):
            return False
    return bool(text) or choice.get("finish_reason") is None


def _take_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.input_tokens = usage.get("prompt_tokens")
    answer.output_tokens = usage.get("completion_tokens")
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _fail_with(error: object) -> NoReturn:
    message = error.get("message") if isinstance(error, dict) else error
    raise RequestFailedError(f"error event: {message}"[:_MAX_ERROR_CHARACTERS])


def _problem(error: Exception) -> str:
    """In one line; the library's own text of a refused connection names its settings, too."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:_MAX_ERROR_CHARACTERS]


def _error_text(body: bytes) -> str:
    """The message of an error's body: OpenAI's object, or whatever it is."""
    text = body.decode(errors="replace").strip()
    try:
        fields = json.loads(text)
        error = fields.get("error", fields)
        message = error if isinstance(error, str) else error.get("message", text)
    except (ValueError, AttributeError):
        message = text
    return str(message).replace("\n", " ")[:_MAX_ERROR_CHARACTERS] or "no text"
