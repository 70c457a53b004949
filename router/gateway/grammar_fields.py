"""What an answer must match: OpenAI's response_format, and the fields by which other servers' clients ask for more."""

from collections.abc import Callable
from typing import Any

from pageferry.router.gateway.fields import Fields
from pageferry.router.gateway.strict_json import as_json, kind_of
from pageferry.v1 import types_pb2 as types

_HARMLESS = ("name", "description", "strict")  # of a schema: an answer always matches it


def read_grammar(fields: Fields) -> types.Grammar | None:
    """At most one of `response_format`, `guided_…` and `structured_outputs`; absent: None."""
    found: dict[str, types.Grammar] = {}
    _read_plain(fields, _GUIDED, found)
    if (outputs := fields.part("structured_outputs")) is not None:
        _read_plain(outputs, _STRUCTURED, found)
        if outputs.flag("json_object"):
            found[outputs.path("json_object")] = types.Grammar(json_object=True)
        outputs.finish()
    if (chosen := fields.part("response_format")) is not None:
        form = read_format(chosen, nested=True)
        if form is not None:
            found["response_format"] = form
    if len(found) > 1:
        first, second, *_ = found
        fields.refuse(second, f"can't be asked for together with {first}")
    for name, grammar in found.items():
        name_grammar(fields, grammar, name)
        return grammar
    return None


def name_grammar(fields: Fields, grammar: types.Grammar, name: str) -> None:
    """Remember the field that set it."""
    fields.sets(name, f"grammar.{grammar.WhichOneof('kind')}", "grammar")


def read_format(form: Fields, *, nested: bool) -> types.Grammar | None:
    """`response_format`, or `text.format`, whose schema is not `nested` in an object of its own."""
    kind = form.text("type")
    if kind == "text":
        form.finish()
        return None
    if kind == "json_object":
        form.finish()
        return types.Grammar(json_object=True)
    if kind != "json_schema":
        form.refuse("type", "must be text, json_object or json_schema")
    holder = form.part("json_schema") if nested else form
    if holder is None:
        form.refuse("json_schema", "must be an object with the schema")
    for harmless in _HARMLESS:
        holder.get(harmless)
    grammar = types.Grammar(json_schema=_schema(holder, "schema"))
    holder.finish()
    form.finish()
    return grammar


def _schema(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, dict):
        fields.refuse(name, f"is {kind_of(value)}, must be a JSON schema, an object")
    return as_json(value, fields.path(name))


def _json(fields: Fields, name: str) -> types.Grammar:
    value = fields.get(name)
    if isinstance(value, str):
        return types.Grammar(json_schema=fields.text(name))
    return types.Grammar(json_schema=_schema(fields, name))


def _choices(fields: Fields, name: str) -> types.Grammar:
    texts = fields.texts(name)
    if not texts or "" in texts:
        fields.refuse(name, "must be at least one text, none empty")
    return types.Grammar(choices=types.Choices(texts=texts))


_Reader = Callable[[Fields, str], types.Grammar]
_GUIDED: dict[str, _Reader] = {
    "guided_json": _json,
    "guided_regex": lambda fields, name: types.Grammar(regex=fields.text(name)),
    "guided_choice": _choices,
    "guided_grammar": lambda fields, name: types.Grammar(lark=fields.text(name)),
}
_STRUCTURED = {name.removeprefix("guided_"): reader for name, reader in _GUIDED.items()}


def _read_plain(fields: Fields, readers: dict[str, _Reader], found: dict[str, Any]) -> None:
    for name, reader in readers.items():
        if fields.get(name) is not None:
            found[fields.path(name)] = reader(fields, name)
