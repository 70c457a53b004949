"""A body's fields, read by name and type; what nobody has read is refused, or listed as ignored.

Ranges of sampling parameters are the frontend's to check; here is only what the contract's types can't carry.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pageferry.router.gateway.strict_json import Json, kind_of, refuse, shown

UINT32 = 2**32 - 1
_MAX_IGNORED = 32  # names that are listed


@dataclass(slots=True)
class Reading:
    """How a body is read, and what is to be remembered of it."""

    refuse_unknown: bool = True
    ignored: list[str] = field(default_factory=list)  # paths, in the order in which they were found
    names: dict[str, str] = field(default_factory=dict)  # fields of the contract, and the body's paths that set them

    def note(self, path: str) -> None:
        if len(self.ignored) < _MAX_IGNORED:
            self.ignored.append(path)


class Fields:
    """One object of a body. A field that is null counts as absent. Every reader raises InvalidArgumentError."""

    def __init__(self, values: Json, reading: Reading, path: str = "") -> None:
        self._values = values
        self._reading = reading
        self._path = f"{path}." if path else ""
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The field's name as an error tells it, from the top of the body."""
        return self._path + shown(name)

    def sets(self, name: str, *of_contract: str) -> None:
        """Remember that this field sets those of the contract, so that an error about one of them names this one."""
        self._reading.names.update(dict.fromkeys(of_contract, self.path(name)))

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def refuse(self, name: str, description: str, *, reason: str = "INVALID_FIELD") -> NoReturn:
        refuse(self.path(name), description, reason=reason)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None else as_text(value, self.path(name))

    def flag(self, name: str, *, absent: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return absent
        if not isinstance(value, bool):
            refuse(self.path(name), f"is {kind_of(value)}, must be true or false")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        return None if value is None else as_number(value, self.path(name))

    def integer(self, name: str, *, low: int = 0, high: int = UINT32) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            refuse(self.path(name), f"is {kind_of(value)}, must be a whole number from {low} to {high}")
        return value

    def list_of(self, name: str, what: str) -> list[Any]:
        """Empty where the field is absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            refuse(self.path(name), f"is {kind_of(value)}, must be a list of {what}")
        return value

    def texts(self, name: str, *, or_one: bool = False) -> list[str]:
        """A list of texts; with `or_one` a single text does, too."""
        if or_one and isinstance(value := self.get(name), str):
            return [as_text(value, self.path(name))]
        values = self.list_of(name, "strings")
        return [as_text(value, f"{self.path(name)}[{i}]") for i, value in enumerate(values)]

    def token_ids(self, name: str) -> list[int]:
        return as_token_ids(self.list_of(name, "token ids"), self.path(name))

    def part(self, name: str) -> "Fields | None":
        """The object's own fields; its reader calls `finish` on them."""
        value = self.get(name)
        return None if value is None else as_fields(value, self._reading, self.path(name))

    def parts(self, name: str) -> "list[Fields]":
        values = self.list_of(name, "objects")
        return [as_fields(value, self._reading, f"{self.path(name)}[{i}]") for i, value in enumerate(values)]

    def finish(
        self, where: str = "", *, harmless: Collection[str] = (), neutral: Mapping[str, object] | None = None
    ) -> None:
        """Settle what was not read.

        `harmless` fields change no answer: they are noted. `neutral` has fields that would change it, with the value
        that asks for nothing, which passes. Of all others `Reading` decides; `where` names the object in an error.
        """
        neutral = neutral or {}
        for name, value in self._values.items():
            if name in self._read or value is None:
                continue
            if name in neutral:
                if value != neutral[name]:
                    refuse(self.path(name), "is not supported; leave it out", reason="UNSUPPORTED_FIELD")
            elif name in harmless:
                self._reading.note(self.path(name))
            elif self._reading.refuse_unknown:
                self._refuse_unknown(name, where or self._path.rstrip("."), [*self._read, *harmless, *neutral])
            else:
                self._reading.note(self.path(name))

    def _refuse_unknown(self, name: str, where: str, known: list[str]) -> None:
        close = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        refuse(self.path(name), f"is not a field of {where}{hint}", reason="UNKNOWN_FIELD")


def as_fields(value: object, reading: Reading, path: str) -> Fields:
    if not isinstance(value, dict):
        refuse(path, f"is {kind_of(value)}, must be an object")
    return Fields(value, reading, path)


def as_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        refuse(path, f"is {kind_of(value)}, must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse(path, f"holds half of a surrogate pair at character {error.start}")
    return value


def as_number(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        refuse(path, f"is {kind_of(value)}, must be a number")
    return float(value)


def as_token_ids(ids: list[Any], path: str) -> list[int]:
    for i, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= UINT32:
            refuse(f"{path}[{i}]", f"is {kind_of(token_id)}, must be a token id, at least 0")
    return ids
