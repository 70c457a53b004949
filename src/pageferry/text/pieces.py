"""The bytes of each token, so that a text put together token by token comes out as it would all at once.

Text is defined here as the tokens' bytes, joined and then decoded as UTF-8. For byte-level vocabularies that is what
the `tokenizers` library does. For vocabularies with byte fallback the library turns a whole run of byte tokens into
replacement characters where one of them is wrong; here only the wrong one becomes one, so that a character that was
sent stays right whatever follows it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from pageferry.core.errors import InvalidArgumentError

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for, as GPT-2 chose them."""
    spare = iter(range(256, 512))
    return {chr(byte) if byte in _PRINTABLE else chr(next(spare)): byte for byte in range(256)}


_BYTES = byte_characters()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a token's string becomes bytes, read from the decoder of a `tokenizer.json`."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_spaces: int = 0  # spaces dropped from the start of a text
    dropped_first: str = ""  # a character dropped from a text's first token, wherever it stands

    @classmethod
    def from_decoder(cls, decoder: Mapping[str, Any] | None) -> "PieceRule":
        """Raises InvalidArgumentError for decoders that language models of today do not use."""
        if decoder is None:
            raise _unsupported("without a decoder")
        parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        if [part["type"] for part in parts] == ["ByteLevel"]:
            return cls(byte_level=True)
        values: dict[str, Any] = {"replacements": ()}
        is_fused = False
        for part in parts:
            match part:
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    values["replacements"] += ((old, new),)
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                    values["replacements"] += ((old, " "),)
                    values["dropped_first"] = "" if scheme == "never" else old
                case {"type": "ByteFallback"}:
                    values["byte_fallback"] = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if is_fused:
                    values["strip_spaces"] = start
                case _:
                    raise _unsupported(f"with the decoder {part['type']}")
        return cls(**values)

    def to_bytes(self, token: str, *, is_first: bool) -> bytes:
        if self.byte_level:
            try:
                return bytes([_BYTES[character] for character in token])
            except KeyError:  # an added token, written in plain text
                return token.encode()
        if is_first and self.dropped_first:
            token = token.replace(self.dropped_first, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.encode()


def _unsupported(what: str) -> InvalidArgumentError:
    known = "ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip"
    return InvalidArgumentError(f"a tokenizer {what} is not supported, but {known}", reason="TOKENIZER_UNSUPPORTED")


class Pieces:
    """Bytes of all tokens, computed as they are first asked for."""

    def __init__(self, token: Callable[[int], str | None], rule: PieceRule, special_ids: Set[int]) -> None:
        self.rule = rule
        self.special_ids = special_ids
        self._token = token
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Bytes of a token inside, or at the start of, a text; empty for an id that has no token."""
        if is_first:
            return self.rule.to_bytes(self._token(token_id) or "", is_first=True)
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self.rule.to_bytes(self._token(token_id) or "", is_first=False)
        return known

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        reader = PieceReader(self, skip_special=skip_special)
        return b"".join(reader.read(token_id) for token_id in token_ids).decode(errors="replace")


class PieceReader:
    """One text's way through its tokens; knows what is left out at the text's start."""

    __slots__ = ("_is_first", "_pieces", "_skip_special", "_to_strip")

    def __init__(self, pieces: Pieces, *, skip_special: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._is_first = True
        self._to_strip = pieces.rule.strip_spaces

    def read(self, token_id: int) -> bytes:
        if self._skip_special and token_id in self._pieces.special_ids:
            return b""
        data = self._pieces.bytes_of(token_id, is_first=self._is_first)
        self._is_first = False
        if self._to_strip and data:
            kept = data.lstrip(b" ")
            num_stripped = min(self._to_strip, len(data) - len(kept))
            # The first character that is no space ends the stripping.
            self._to_strip = 0 if kept else self._to_strip - num_stripped
            data = data[num_stripped:]
        return data


def decoder_of(state: bytes) -> Mapping[str, Any]:
    """The description that the `tokenizers` library gives of a decoder when it is pickled."""
    description: Mapping[str, Any] = json.loads(state)
    return description
