"""JSON objects read strictly, and written; and the errors that name what is wrong with one without quoting it."""

import json
import math
from typing import Any, NoReturn

from pageferry.core.errors import invalid_field

Json = dict[str, Any]
_MAX_NAME = 64  # characters of a request's own that a message repeats


def refuse(field: str, description: str, *, reason: str = "INVALID_FIELD") -> NoReturn:
    """Raise InvalidArgumentError for one field; `description` reads on from its name."""
    raise invalid_field(field, description, reason=reason)


def decode_json(body: bytes) -> Json:
    """A JSON object, strictly: UTF-8, no NaN or Infinity, no field twice. Raises InvalidArgumentError."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite_float,
            object_pairs_hook=_unique_fields,
        )
    except UnicodeDecodeError as error:
        _malformed(f"is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        _malformed(f"is not JSON: {error.msg} at line {error.lineno} column {error.colno} (character {error.pos})")
    except RecursionError:
        _malformed("is nested too deeply")
    except ValueError:
        _malformed("holds a whole number with more digits than any field takes")
    if not isinstance(value, dict):
        _malformed(f"is {kind_of(value)}, must be a JSON object")
    return value


def as_json(value: object, path: str) -> str:
    """Part of a body as JSON text again. Raises InvalidArgumentError for what can't be passed on."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except RecursionError:
        refuse(path, "is nested too deeply")
    except UnicodeEncodeError:
        refuse(path, "holds half of a surrogate pair")
    return text


def dump(value: Json | list[Any]) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _malformed(description: str) -> NoReturn:
    refuse("body", description, reason="MALFORMED_JSON")


def _no_constant(name: str) -> NoReturn:
    _malformed(f"holds {name}, which is not JSON; numbers must be finite")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _malformed("holds a number beyond the range of a double; numbers must be finite")
    return value


def _unique_fields(pairs: list[tuple[str, Any]]) -> Json:
    fields: Json = {}
    for name, value in pairs:
        if name in fields:
            refuse(shown(name), "is given twice", reason="MALFORMED_JSON")
        fields[name] = value
    return fields


def shown(name: str) -> str:
    """A name that the request gave, fit for a message: short, and without halves of surrogate pairs."""
    return name[:_MAX_NAME].encode(errors="replace").decode()


def kind_of(value: object) -> str:
    """A number or constant as it is; of anything else only its kind, since it may be a request's text."""
    match value:
        case None | bool():
            return json.dumps(value)
        case int() | float():
            return str(value) if abs(value) < 1e30 else "a number out of range"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
