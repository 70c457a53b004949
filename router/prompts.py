"""The token ids of what a request asks to continue: a text, a conversation, or ids as they are."""

import asyncio
from collections.abc import Sequence

from pageferry.core.config import RouterConfig
from pageferry.core.errors import FieldViolation, ResourceExhaustedError, invalid
from pageferry.router import conversation
from pageferry.text.tokenizer import Tokenizer
from pageferry.v1.inference_pb2 import ChatMessages, GenerateRequest, TokenizeRequest

# Texts above this are tokenised on another thread, so that the event loop's streams don't wait.
_OFF_LOOP_BYTES = 8192


class Prompts:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, config: RouterConfig) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._config = config

    async def of_generate(self, request: GenerateRequest) -> tuple[int, ...]:
        """At least one. Raises the error of the first thing that is wrong."""
        match request.WhichOneof("input"):
            case "prompt":
                ids = await self._encode("prompt", request.prompt)
            case "chat":
                ids = await self._encode_chat(request.chat)
            case "token_ids":
                ids = list(request.token_ids.ids)
                check_ids("token_ids", ids, self._vocab_size)
            case _:
                raise invalid("input", None, "must be prompt, chat or token_ids")
        if not ids:
            raise invalid(str(request.WhichOneof("input")), "", "must hold at least one token")
        return tuple(ids)

    async def of_tokenize(self, request: TokenizeRequest) -> list[int]:
        """The same ids for the same input."""
        match request.WhichOneof("input"):
            case "text":
                return await self._encode("text", request.text)
            case "chat":
                return await self._encode_chat(request.chat)
            case _:
                raise invalid("input", None, "must be text or chat")

    async def _encode(self, field: str, text: str, *, add_special: bool = True) -> list[int]:
        if not text:
            raise invalid(field, text, "must not be empty")
        num_bytes = len(text.encode())
        self._check_bytes(field, num_bytes)
        if num_bytes <= _OFF_LOOP_BYTES:
            return self._tokenizer.encode(text, add_special=add_special)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special=add_special)

    async def _encode_chat(self, chat: ChatMessages) -> list[int]:
        self._check_bytes("chat", conversation.num_bytes(chat))
        template, normalise_system = self._tokenizer.template, self._config.normalise_system
        text = await conversation.rendered(chat, template, normalise_system=normalise_system)
        return await self._encode("chat", text, add_special=False)

    def _check_bytes(self, field: str, num_bytes: int) -> None:
        if num_bytes > self._config.max_prompt_bytes:
            description = f"is {num_bytes} bytes, the limit is {self._config.max_prompt_bytes}"
            raise ResourceExhaustedError(
                f"{field} {description}", reason="PROMPT_TOO_LARGE", violations=(FieldViolation(field, description),)
            )


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgumentError where one of them is none of the model's."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(id_ for id_ in ids if not 0 <= id_ < vocab_size)
        raise invalid(field, wrong, f"must be token ids from 0 to {vocab_size - 1}")
