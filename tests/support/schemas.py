"""JSON schemas whose outputs are short, and a check of values against them that shares nothing with the matcher."""

import json
import re
from typing import Any

Schema = dict[str, Any]
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def _record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 10}
_COUNT: Schema = {"type": "integer", "minimum": -20, "maximum": 1500}
SCHEMAS: tuple[Schema, ...] = (
    _record(name=_WORD, age=_COUNT, member={"type": "boolean"}),
    _record(tags={"type": "array", "items": {"enum": ["red", "green", "öl", 'a "b"']}, "minItems": 1, "maxItems": 4}),
    _record(at=_record(x=_COUNT, y=_COUNT), label={"anyOf": [{"type": "null"}, _WORD]}),
    {"type": "array", "items": _record(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}), "maxItems": 3},
    {"anyOf": [{"const": {"kind": "none"}}, _record(kind={"const": "some"}, value=_WORD)]},
)


def parse(text: str, schema: Schema) -> Any:
    """The value; fails where the text is none of the schema's."""
    value = json.loads(text)
    assert matches(value, schema), f"{value} is none of {schema}"
    return value


def matches(value: Any, schema: Schema) -> bool:
    """Knows the keywords used above, and no others."""
    known = {"type", "properties", "required", "additionalProperties", "enum", "const", "anyOf", "items", "pattern"}
    bounds = {"minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"}
    assert not schema.keys() - known - bounds, schema
    kind = schema.get("type")
    if kind == "integer":
        return isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
    if kind is not None and not isinstance(value, _TYPES[kind]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(matches(value, one) for one in schema["anyOf"]):
        return False
    if kind == "object":
        keys_fit = set(schema["required"]) == set(value) == set(schema["properties"])
        return keys_fit and all(matches(value[key], one) for key, one in schema["properties"].items())
    if kind == "array":
        length_fits = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return length_fits and all(matches(item, schema["items"]) for item in value)
    if kind == "string" and "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    return kind != "string" or schema["minLength"] <= len(value) <= schema["maxLength"]
