"""Writes docs/api.md from the contract's comments: `make proto` runs it, and `make proto-check` compares.

Its input is a FileDescriptorSet with source information. An element without a comment is an error.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

HEAD = """# API reference

Generated from the comments in [`proto/`](../proto) by `make proto`; not to be edited here. Who reads it for the first
time begins at [`InferenceService`](#pageferry.v1.InferenceService): it is all that clients need. What travels over HTTP
is in [openai.md](openai.md), how clients of other languages are made in [clients.md](clients.md).

A field that is left out has its type's zero value, unless its comment says more; `optional` fields tell absence apart
from zero. Of a `oneof`, at most one field is set. Durations carry their unit in the name (`_ms`, `_s`). Errors are gRPC
statuses with `ErrorInfo` (a stable reason), `BadRequest` (fields) and `RetryInfo` (when to come again) as details.
"""
PACKAGES = {
    "pageferry.v1": "Pageferry's own contract: clients call `InferenceService`, all else is between its services.",
    "inference": "The Open Inference Protocol of KServe and Triton, as far as it is served ([kserve.md](kserve.md)).",
    "envoy.service.ext_proc.v3": (
        "Envoy's external processing, as far as an endpoint picker needs it ([endpoint-picker.md](endpoint-picker.md))."
    ),
}
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6  # numbers of fields of descriptors, of which paths are made
_FIELD, _NESTED, _ENUM_IN_MESSAGE, _ONEOF, _VALUE, _METHOD = 2, 3, 4, 8, 2, 2
Type = FieldDescriptorProto.Type
Path_ = tuple[int, ...]


@dataclass(frozen=True)
class File:
    """One .proto file with its comments, by the path of what they are about."""

    proto: FileDescriptorProto
    comments: dict[Path_, str]

    @classmethod
    def of(cls, proto: FileDescriptorProto) -> "File":
        located = proto.source_code_info.location
        return cls(proto, {tuple(one.path): one.leading_comments for one in located if one.leading_comments})

    @property
    def name(self) -> str:
        return Path(self.proto.name).name

    @property
    def anchor(self) -> str:
        return f"{self.proto.package}-{self.name}"

    def comment(self, path: Path_, what: str) -> str:
        """In one line a paragraph. Raises ValueError where there is none."""
        if path not in self.comments:
            raise ValueError(f"{self.proto.name}: {what} has no comment")
        paragraphs = self.comments[path].strip().split("\n\n")
        return "\n\n".join(" ".join(line.strip() for line in one.splitlines()) for one in paragraphs)

    def named(self, *names: str) -> str:
        return ".".join((self.proto.package, *names))

    def services(self) -> Iterator[tuple[str, Path_, ServiceDescriptorProto]]:
        for index, service in enumerate(self.proto.service):
            yield service.name, (_FILE_SERVICE, index), service

    def messages(self) -> Iterator[tuple[str, Path_, DescriptorProto]]:
        """With those inside others behind these; entries of maps are none."""
        for index, message in enumerate(self.proto.message_type):
            yield from _with_nested(message, message.name, (_FILE_MESSAGE, index))

    def enums(self) -> Iterator[tuple[str, Path_, EnumDescriptorProto]]:
        for index, enum in enumerate(self.proto.enum_type):
            yield enum.name, (_FILE_ENUM, index), enum
        for name, path, message in self.messages():
            for index, enum in enumerate(message.enum_type):
                yield f"{name}.{enum.name}", (*path, _ENUM_IN_MESSAGE, index), enum


def _with_nested(message: DescriptorProto, name: str, path: Path_) -> Iterator[tuple[str, Path_, DescriptorProto]]:
    if message.options.map_entry:
        return
    yield name, path, message
    for index, nested in enumerate(message.nested_type):
        yield from _with_nested(nested, f"{name}.{nested.name}", (*path, _NESTED, index))


def reference(files: Sequence[File]) -> str:
    """The whole page: what clients need comes first."""
    lines = [HEAD, "## Contents", ""]
    for package in PACKAGES:
        lines.append(f"* [`{package}`](#{package})")
        for file in _of(package, files):
            lines.append(f"  * [{file.name}](#{file.anchor})")
            lines += [f"    * {line}" for line in _contents(file)]
    for package, text in PACKAGES.items():
        lines += ["", f'## <a id="{package}"></a>{package}', "", text]
        for file in _of(package, files):
            lines += ["", f'### <a id="{file.anchor}"></a>{file.name}']
            lines += [*_services(file), *_messages(file), *_enums(file)]
    return "\n".join(lines) + "\n"


def _of(package: str, files: Sequence[File]) -> list[File]:
    own = [file for file in files if file.proto.package == package]
    return sorted(own, key=lambda file: (file.name != "inference.proto", file.name))


def _contents(file: File) -> Iterator[str]:
    kinds: list[tuple[str, Iterator[tuple[str, Path_, Any]]]] = [
        ("Services", file.services()),
        ("Messages", file.messages()),
        ("Enumerations", file.enums()),
    ]
    for title, found in kinds:
        links = [f"[`{name}`](#{file.named(name)})" for name, *_ in found]
        if links:
            yield f"{title}: {', '.join(links)}"


def _services(file: File) -> Iterator[str]:
    for name, path, service in file.services():
        yield from _heading(file, name, f"service {name}", path)
        yield from ("", "| Call | Takes | Gives | |", "|---|---|---|---|")
        for index, method in enumerate(service.method):
            text = _cell(file.comment((*path, _METHOD, index), f"{name}.{method.name}"))
            takes = _link(method.input_type, streams=method.client_streaming)
            yield f"| `{method.name}` | {takes} | {_gives(method)} | {text} |"


def _gives(method: MethodDescriptorProto) -> str:
    return _link(method.output_type, streams=method.server_streaming)


def _messages(file: File) -> Iterator[str]:
    for name, path, message in file.messages():
        yield from _heading(file, name, name, path)
        if not message.field:
            continue
        entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        yield from ("", "| Field | Type | No. | |", "|---|---|---|---|")
        for index, field in enumerate(message.field):
            text = _cell(file.comment((*path, _FIELD, index), f"{name}.{field.name}"))
            yield f"| `{field.name}` | {_type(field, entries)} | {field.number} | {_one_of(message, field)}{text} |"
        for index, oneof in enumerate(message.oneof_decl):
            if not any(field.proto3_optional and field.oneof_index == index for field in message.field):
                text = file.comment((*path, _ONEOF, index), f"{name}.{oneof.name}")
                yield from ("", f"oneof `{oneof.name}`: {text}")


def _enums(file: File) -> Iterator[str]:
    for name, path, enum in file.enums():
        yield from _heading(file, name, f"enum {name}", path)
        yield from ("", "| Value | No. | |", "|---|---|---|")
        for index, value in enumerate(enum.value):
            text = _cell(file.comment((*path, _VALUE, index), f"{name}.{value.name}"))
            yield f"| `{value.name}` | {value.number} | {text} |"


def _heading(file: File, name: str, title: str, path: Path_) -> tuple[str, ...]:
    return ("", f'#### <a id="{file.named(name)}"></a>{title}', "", file.comment(path, name))


def _type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2]) if field.type == Type.TYPE_MESSAGE else None
    if entry is not None:
        key, value = entry.field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {_scalar(field)}"
    return f"optional {_scalar(field)}" if field.proto3_optional else _scalar(field)


def _scalar(field: FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else f"`{Type.Name(field.type).removeprefix('TYPE_').lower()}`"


def _link(type_name: str, *, streams: bool = False) -> str:
    """Of what is described here; the well-known types are not."""
    name = type_name.lstrip(".")
    package = next((one for one in PACKAGES if name.startswith(f"{one}.")), "")
    text = f"[`{name.removeprefix(f'{package}.')}`](#{name})" if package else f"`{name}`"
    return f"stream of {text}" if streams else text


def _one_of(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return f"(oneof `{message.oneof_decl[field.oneof_index].name}`) "


def _cell(text: str) -> str:
    return text.replace("\n\n", "<br>").replace("|", "\\|")


def main(source: str, target: str) -> None:
    """Paths of a FileDescriptorSet, and of the page."""
    described = FileDescriptorSet.FromString(Path(source).read_bytes())
    files = [File.of(proto) for proto in described.file if proto.package in PACKAGES]
    Path(target).write_text(reference(files), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
