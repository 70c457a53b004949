"""What the fuzz tests feed parsers, and how they hold them to their contract.

A parser may take any input, or raise a PageferryError whose message is short; it does so in bounded time. Memory is
bounded by `tests/fuzz/run.py`, which limits the processes that it starts.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import currently_in_test_context, note, strategies as st

from pageferry.core.errors import PageferryError

MAX_CPU_S = 5.0  # of one input: a hundred times what the slowest takes
MAX_MESSAGE = 4096  # characters of an error
M = TypeVar("M", bound=Message)

# Numbers at the edges of what fields hold, of what pages hold, and of what a careless sum overflows.
EDGES = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 255, 256, 1000, 4096, 65535, 65536]
EDGES += [2**exponent + step for exponent in (31, 32, 53, 62, 63, 64) for step in (-1, 0, 1)]


@contextmanager
def held_to_contract(*others: type[Exception]) -> Iterator[None]:
    """Let PageferryError, or one of `others`, pass as the parser's answer; anything else is a find."""
    began = time.thread_time()
    try:
        yield
    except PageferryError as error:
        _note(f"refused: {error.message}")
        assert len(error.message) <= MAX_MESSAGE, f"an error of {len(error.message)} characters"
        error.message.encode()  # or it could not be told to anybody
    except others as error:
        _note(f"refused: {type(error).__name__}")
    spent = time.thread_time() - began
    assert spent < MAX_CPU_S, f"took {spent:.1f} s of processor time"


def _note(text: str) -> None:
    if currently_in_test_context():
        note(text)


def numbers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [edge for edge in EDGES if low <= edge <= high]
    return st.sampled_from(edges) | st.integers(low, high)


_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "number", "insert", "delete", "repeat", "cut"]),
        st.integers(0, 2**20),
        st.integers(0, 255),
        st.sampled_from([*EDGES, 2**64 - 1]),
    ),
    min_size=1,
    max_size=6,
)


def mutated(whole: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Good bytes with a few faults: bytes and little-endian numbers overwritten, parts put in, left out or repeated."""
    return st.builds(_edited, whole, _EDITS) | whole


def _edited(whole: bytes, edits: list[tuple[str, int, int, int]]) -> bytes:
    data = bytearray(whole)
    for kind, where, value, number in edits:
        at = where % (len(data) + 1)
        match kind:
            case "set":
                data[at : at + 1] = bytes([value])
            case "number":
                width = 8 if value % 2 else 4
                data[at : at + width] = (number % 256**width).to_bytes(width, "little")
            case "insert":
                data[at:at] = bytes([value]) * (number % 64)
            case "delete":
                del data[at : at + number % 64]
            case "repeat":
                data[at:at] = data[at : at + number % 64]
            case "cut":
                del data[at:]
    return bytes(data)


TEXTS = st.text(max_size=20) | st.sampled_from(["", " ", "\x00", "\ud800", "NaN", "ü", "😀", "a" * 5000])
_SCALARS = (
    st.none() | st.booleans() | numbers(-(2**65), 2**65) | st.sampled_from([10**400, -(10**400)]) | st.floats() | TEXTS
)
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8
)


@st.composite
def altered(draw: st.DrawFn, document: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> Any:
    """The document with some of its values replaced, removed or added, at any depth; `extra`: what may be added."""
    changed = copy.deepcopy(dict(document))
    for _ in range(draw(st.integers(0, 4))):
        place: Any = changed
        while True:
            keys = list(range(len(place))) if isinstance(place, list) else [*place, *(extra or {}), "x"]
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            known = isinstance(place, list) or key in place
            if known and isinstance(place[key], dict | list) and draw(st.booleans()):
                place = place[key]
                continue
            if known and isinstance(place, dict) and draw(st.booleans()):
                del place[key]
            else:
                suited = (extra or {}).get(key)
                value = draw(JSON_VALUES if suited is None else st.sampled_from(suited) | JSON_VALUES)
                place[key] = copy.deepcopy(value)
            break
    return changed


def as_json(value: Any) -> bytes:
    """As a careless writer has it: with NaN, and with halves of surrogate pairs as escapes."""
    return json.dumps(value, ensure_ascii=True).encode()


_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (0, 2**31 - 1),
}
WIRE_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.just("x" * 5000)


def messages(kind: type[M], *, depth: int = 4) -> st.SearchStrategy[M]:
    """Any message of the kind: each field absent, at an edge, or anything that its type holds."""

    @st.composite
    def build(draw: st.DrawFn) -> M:
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if draw(st.integers(0, 3)):
                _fill(draw, message, field, depth)
        return message

    return build()


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        if depth == 0:
            return
        inner = messages(GetMessageClass(field.message_type), depth=depth - 1)
        if _is_map(field):  # of entries, whose key and value may be left out
            for entry in draw(st.lists(inner, max_size=3)):
                _set_entry(getattr(message, field.name), entry)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
        else:
            getattr(message, field.name).CopyFrom(draw(inner))
        return
    values = _values(field)
    if field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(values, max_size=5)))
    else:
        setattr(message, field.name, draw(values))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _set_entry(target: Any, entry: Any) -> None:
    if entry.DESCRIPTOR.fields_by_name["value"].message_type is None:
        target[entry.key] = entry.value
    else:
        target[entry.key].CopyFrom(entry.value)


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_ENUM and field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values]) | st.integers(0, 2**31 - 1)
    if field.type in _INTEGERS:
        return numbers(*_INTEGERS[field.type])
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            return WIRE_TEXTS
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=40) | st.just(b"x" * 5000)
        case FieldDescriptor.TYPE_FLOAT:
            return st.floats(width=32)
        case _:
            return st.floats()


def near(good: M, *, depth: int = 3) -> st.SearchStrategy[M]:
    """A good message with some fields of it, at any depth, cleared or filled with anything."""

    @st.composite
    def build(draw: st.DrawFn) -> M:
        message = copy.deepcopy(good)
        for _ in range(draw(st.integers(1, 3))):
            _disturb(draw, message, depth)
        return message

    return build()


def _disturb(draw: st.DrawFn, message: Message, depth: int) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if field.message_type is not None and depth and not _is_map(field):
        inner = getattr(message, field.name)
        chosen = inner[draw(st.integers(0, len(inner) - 1))] if field.is_repeated and len(inner) else None
        if chosen is not None or not field.is_repeated:
            _disturb(draw, chosen if chosen is not None else inner, depth - 1)
            return
    message.ClearField(field.name)
    if draw(st.booleans()):
        _fill(draw, message, field, depth)


def through_wire(message: M, parse: Callable[[bytes], Any]) -> Any:
    """As the peer gets it."""
    return parse(message.SerializeToString())
