"""The answers of /v1/chat/completions and /v1/completions: choices, counted across prompts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from pageferry.core.errors import PageferryError
from pageferry.router.gateway.errors import error_body
from pageferry.router.gateway.logprobs import (
    CompletionLogprobs,
    TokenBytes,
    chat_entries,
    joined,
    prompt_entries,
    reported,
)
from pageferry.router.gateway.parsed import Parsed
from pageferry.router.gateway.reply import Choice, end_of, summed
from pageferry.router.gateway.strict_json import Json
from pageferry.router.gateway.tool_calls import ToolCallReader
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types


class _ChoicesReply(ABC):
    """What the two have in common."""

    done = b"data: [DONE]\n\n"
    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, parsed: Parsed, request_id: str, created: int, token_bytes: TokenBytes) -> None:
        self._parsed = parsed
        self._id = f"{self.prefix}-{request_id}"
        self._created = created
        self._token_bytes = token_bytes
        self._model = ""
        self._prompt_tokens = 0
        self._usages: list[types.Usage] = []
        self._choices: dict[int, Choice] = {}
        self._prompts: dict[int, list[types.Logprobs]] = {}  # of those whose log-probabilities have come

    def take(self, prompt: int, event: pb.GenerateResponse) -> list[Json]:
        first = prompt * self._parsed.num_choices
        match event.WhichOneof("event"):
            case "started":
                self._model = event.started.model
                self._prompt_tokens += event.started.prompt_tokens
                return []
            case "delta":
                opening, choice = self._choice(first + event.delta.choice)
                return [*opening, *self._delta(choice, event.delta)]
            case "choice_finished":
                return self._end(first + event.choice_finished.choice, event.choice_finished)
            case _:
                self._usages.append(event.finished.usage)
                return self._end(first, end_of(event.finished))

    def closing(self) -> list[Json]:
        streaming = self._parsed.streaming
        if streaming is None or not streaming.usage:
            return []
        return [self._envelope(self.chunk_kind, []) | {"usage": usage(summed(self._usages))}]

    def whole(self) -> Json:
        choices = [self._whole(choice) for _, choice in sorted(self._choices.items())]
        return self._envelope(self.kind, choices) | {"usage": usage(summed(self._usages))}

    def failed(self, error: PageferryError) -> Json:
        return error_body(error)

    def _choice(self, index: int) -> tuple[list[Json], Choice]:
        """The choice, and what opens its stream where it is new."""
        if index in self._choices:
            return [], self._choices[index]
        choice = self._choices[index] = self._new(index)
        opening = self._opening()
        return ([] if opening is None else [self._chunk(choice, opening, None)]), choice

    def _delta(self, choice: Choice, delta: pb.Delta) -> list[Json]:
        choice.num_tokens += len(delta.tokens)
        if delta.HasField("prompt_logprobs"):  # with the first choice; the others share them
            self._prompts[self._prompt_of(choice)] = list(delta.prompt_logprobs.tokens)
        has_prompt = not choice.has_begun and self._prompt_of(choice) in self._prompts
        choice.has_begun = True
        text, calls = choice.push(delta.text)
        if self._parsed.streaming is None:
            choice.tokens += delta.tokens
            return []
        logprobs = self._logprobs(choice, delta.tokens, delta.text if has_prompt else None)
        if not text and not calls and logprobs is None and not has_prompt:
            return []
        chunk = self._chunk(choice, self._content(text, self._numbered(choice, calls)), logprobs)
        if has_prompt:
            chunk["choices"][0].update(self._prompt_logprobs(choice))
        return [chunk]

    def _end(self, index: int, end: pb.ChoiceFinished) -> list[Json]:
        opening, choice = self._choice(index)
        if choice.is_finished:
            return []
        text, calls = choice.finish(end)
        rest = []
        if text or calls:
            rest.append(self._chunk(choice, self._content(text, self._numbered(choice, calls)), None))
        return [*opening, *rest, self._chunk(choice, self._content("", []), None)]

    def _numbered(self, choice: Choice, calls: list[Json]) -> list[Json]:
        before = len(choice.calls) - len(calls)
        return [{"index": before + i, **call} for i, call in enumerate(calls)]

    def _chunk(self, choice: Choice, content: Json, logprobs: Json | None) -> Json:
        chunk = self._envelope(self.chunk_kind, [self._described(choice, content, logprobs)])
        streaming = self._parsed.streaming
        if streaming is not None and streaming.usage:
            chunk["usage"] = usage(self._usage_so_far()) if streaming.usage_everywhere else None
        return chunk

    def _usage_so_far(self) -> types.Usage:
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        return types.Usage(prompt_tokens=self._prompt_tokens, completion_tokens=num_tokens)

    def _whole(self, choice: Choice) -> Json:
        prompt_text = choice.text if self._prompt_of(choice) in self._prompts else None
        logprobs = self._logprobs(choice, choice.tokens, prompt_text)
        return self._described(choice, self._message(choice), logprobs) | self._prompt_logprobs(choice)

    def _described(self, choice: Choice, content: Json, logprobs: Json | None) -> Json:
        described: Json = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": None}
        if choice.is_finished:
            described["finish_reason"] = choice.finish_reason
            if choice.stop_reason is not None:
                described["stop_reason"] = choice.stop_reason
            if choice.score is not None:
                described["score"] = choice.score
        return described

    def _prompt_logprobs(self, choice: Choice) -> Json:
        entries = self._prompts.get(self._prompt_of(choice))
        if entries is None or not self._parsed.prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_entries(entries, self._token_bytes)}

    def _prompt_of(self, choice: Choice) -> int:
        return choice.index // self._parsed.num_choices

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    @abstractmethod
    def _new(self, index: int) -> Choice: ...

    @abstractmethod
    def _opening(self) -> Json | None:
        """What the first chunk of a choice holds."""

    @abstractmethod
    def _content(self, text: str, calls: list[Json]) -> Json:
        """What a further chunk holds."""

    @abstractmethod
    def _message(self, choice: Choice) -> Json:
        """What a whole answer holds."""

    @abstractmethod
    def _logprobs(self, choice: Choice, tokens: Iterable[types.GeneratedToken], prompt_text: str | None) -> Json | None:
        """Of the tokens; where `prompt_text` is given, and is to be, behind those of the prompt, which begins it."""


class ChatReply(_ChoicesReply):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _new(self, index: int) -> Choice:
        return Choice(index, ToolCallReader() if self._parsed.calls else None)

    def _opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _content(self, text: str, calls: list[Json]) -> Json:
        delta: Json = {"content": text} if text else {}
        return {"delta": delta | ({"tool_calls": calls} if calls else {})}

    def _message(self, choice: Choice) -> Json:
        text = choice.text
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message |= {"content": text if text.strip() else None, "tool_calls": choice.calls}
        return {"message": message}

    def _logprobs(self, choice: Choice, tokens: Iterable[types.GeneratedToken], prompt_text: str | None) -> Json | None:
        entries = reported(tokens)
        return {"content": chat_entries(entries, self._token_bytes), "refusal": None} if entries else None


class CompletionReply(_ChoicesReply):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, parsed: Parsed, request_id: str, created: int, token_bytes: TokenBytes) -> None:
        super().__init__(parsed, request_id, created, token_bytes)
        self._builders: dict[int, CompletionLogprobs] = {}

    def _new(self, index: int) -> Choice:
        self._builders[index] = CompletionLogprobs(self._token_bytes)
        return Choice(index)

    def _opening(self) -> None:
        return None

    def _content(self, text: str, calls: list[Json]) -> Json:
        return {"text": text}

    def _message(self, choice: Choice) -> Json:
        return {"text": choice.text}

    def _logprobs(self, choice: Choice, tokens: Iterable[types.GeneratedToken], prompt_text: str | None) -> Json | None:
        tokens = list(tokens)
        builder, entries = self._builders[choice.index], reported(tokens)
        prompt = None
        if prompt_text is not None and self._parsed.echo_logprobs:
            of_prompt = self._prompts[self._prompt_of(choice)]
            prompt = builder.of_prompt(of_prompt, prompt_text, [token.token_id for token in tokens])
        return joined(prompt, builder.of(entries) if entries else None)


def usage(counts: types.Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }
