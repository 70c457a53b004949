"""JSON into frozen dataclasses, strictly: every field there, none unknown, each of its type; errors name the field."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pageferry.core.errors import InvalidArgumentError

T = TypeVar("T")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def parse(text: str, where: str) -> object:
    """The JSON value of `text`; InvalidArgumentError names `where` it came from."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidArgumentError(f"{where} is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgumentError(f"{where} is not JSON of ours: it is nested too deeply") from error


def read_as(cls: type[T], value: object, where: str) -> T:
    """`value` as the dataclass; `where` leads to it in errors, e.g. `a.json: summary.cpu`."""
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    hints = _hints(cls)  # type: ignore[arg-type] # a class is hashable
    for name in hints:
        if name not in value:
            raise InvalidArgumentError(f"{_join(where, name)} is missing")
    for name in value:
        if name not in hints:
            raise InvalidArgumentError(f"{_join(where, name)} is no field of this format")
    return cls(**{name: _read(hint, value[name], _join(where, name)) for name, hint in hints.items()})


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(hint: Any, value: object, where: str) -> object:
    if dataclasses.is_dataclass(hint):
        return read_as(hint, value, where)  # type: ignore[arg-type] # a type, as it stands in a hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _read(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            _refuse(where, value, "a list")
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            _refuse(where, value, "an object")
        return {name: _read(arguments[1], item, _join(where, name)) for name, item in value.items()}
    return value if hint is object else _scalar(hint, value, where)


def _scalar(hint: type, value: object, where: str) -> object:
    if hint is float and type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type] # a number
        return float(value)  # type: ignore[arg-type]
    if type(value) is not hint or hint is float:
        _refuse(where, value, _KINDS[hint])
    return value


def _join(where: str, name: str) -> str:
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"


def _refuse(where: str, value: object, wanted: str) -> NoReturn:
    shown = json.dumps(value)
    raise InvalidArgumentError(f"{where} is {shown if len(shown) <= 40 else shown[:40] + '…'}, must be {wanted}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}; numbers must be finite")
