"""Typed access to values of a model's files."""

import sys
from collections.abc import Mapping
from typing import Any

from pageferry.core.errors import invalid

_MAX_WHOLE = 2**31 - 1


class Fields:
    """Typed access to outside values; every refusal names the source, the field, the value and the limit."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def below(self, prefix: str, source: str) -> "Fields":
        """Those whose keys begin with the prefix, without it."""
        values = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        return Fields(source, values)

    def one_of(self, key: str, supported: tuple[str, ...]) -> str:
        value = self.values.get(key)
        if value not in supported:
            raise invalid(f"{self.source}: {key}", value, f"supported are {', '.join(supported)}")
        return str(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_WHOLE:
            raise invalid(f"{self.source}: {key}", value, f"must be a whole number from 1 to {_MAX_WHOLE}")
        return value

    def whole_or_none(self, key: str) -> int | None:
        value = self.values.get(key)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_whole and 0 <= value <= _MAX_WHOLE):
            raise invalid(f"{self.source}: {key}", value, f"must be absent or a whole number up to {_MAX_WHOLE}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise invalid(f"{self.source}: {key}", value, "must be a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.values.get(key)
        if value not in (None, True, False):
            raise invalid(f"{self.source}: {key}", value, "must be true or false")
        return default if value is None else bool(value)

    def refuse_unless(self, key: str, supported: object) -> None:
        value = self.values.get(key)
        if value is not None and value != supported:
            raise invalid(f"{self.source}: {key}", value, f"only {supported!r} is supported")
