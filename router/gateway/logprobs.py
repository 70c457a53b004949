"""Log-probabilities in the forms of the two endpoints. JSON has no infinities: a token that can't be drawn has null."""

import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pageferry.router.gateway.strict_json import Json
from pageferry.v1 import types_pb2 as types

TokenBytes = Callable[[int], bytes]  # a token's own bytes


def reported(tokens: Iterable[types.GeneratedToken]) -> list[types.Logprobs]:
    return [token.logprobs for token in tokens if token.HasField("logprobs")]


def token_name(data: bytes) -> str:
    """A token's text, or, where it is no whole characters, its bytes in the form that OpenAI writes them."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(entries: Iterable[types.Logprobs], token_bytes: TokenBytes) -> list[Json]:
    """One object a token."""

    def entry(token: types.TokenLogprob) -> Json:
        data = token_bytes(token.token_id)
        return {"token": token_name(data), "logprob": _finite(token.logprob), "bytes": list(data)}

    return [entry(each.sampled) | {"top_logprobs": [entry(token) for token in each.top]} for each in entries]


class CompletionLogprobs:
    """The four lists of /v1/completions, for the tokens of one answer as they come."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # in characters of the text

    def of(self, entries: Sequence[types.Logprobs]) -> Json:
        return {
            "tokens": [self._name(entry.sampled) for entry in entries],
            "token_logprobs": [_finite(entry.sampled.logprob) for entry in entries],
            "top_logprobs": [{self._name(token): _finite(token.logprob) for token in entry.top} for entry in entries],
            "text_offset": [self._advance(self._token_bytes(entry.sampled.token_id)) for entry in entries],
        }

    def of_prompt(self, entries: Sequence[types.Logprobs], text: str, output_ids: Iterable[int]) -> Json:
        """Of an echoed prompt, whose first token has no log-probability, so that it is told by its text alone.

        That is what is left at the start of `text`, which holds the prompt's and the output's.
        """
        rest = b"".join(self._token_bytes(entry.sampled.token_id) for entry in entries)
        prompt = text.encode().removesuffix(b"".join(map(self._token_bytes, output_ids)))
        first = prompt.removesuffix(rest) if prompt.endswith(rest) else prompt[: max(0, prompt.find(rest))]
        lists: dict[str, list[Any]] = {
            "tokens": [token_name(first)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(first)],
        }
        rest_of_it = self.of(entries)
        return {name: values + rest_of_it[name] for name, values in lists.items()}

    def _name(self, token: types.TokenLogprob) -> str:
        return token_name(self._token_bytes(token.token_id))

    def _advance(self, data: bytes) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(data))
        return before


def joined(first: Json | None, second: Json | None) -> Json | None:
    """Lists of the one behind lists of the other."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def prompt_entries(entries: Iterable[types.Logprobs], token_bytes: TokenBytes) -> list[Json | None]:
    """As other servers answer `prompt_logprobs`: by token id, the prompt's own token first; of the first one none."""

    def entry(token: types.TokenLogprob) -> Json:
        return {"logprob": _finite(token.logprob), "decoded_token": token_name(token_bytes(token.token_id))}

    return [None, *({str(t.token_id): entry(t) for t in (each.sampled, *each.top)} for each in entries)]


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None
