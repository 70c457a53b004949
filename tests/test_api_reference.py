"""docs/api.md is what the .proto files say, and its links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "docs" / "generate" / "api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorSet:
    target = tmp_path_factory.mktemp("api") / "api.binpb"
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("proto/pageferry/*/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", "--include_source_info"]
    subprocess.run([*command, f"--descriptor_set_out={target}", *protos], cwd=ROOT, check=True, timeout=60)
    return FileDescriptorSet.FromString(target.read_bytes())


def test_the_page_is_current(generator: Any, described: FileDescriptorSet) -> None:
    files = [generator.File.of(proto) for proto in described.file]
    assert {file.proto.package for file in files} == set(generator.PACKAGES)
    assert generator.reference(files) == PAGE.read_text(encoding="utf-8"), "run make proto"


def test_every_element_stands_there_once_and_every_link_leads_to_one(described: FileDescriptorSet) -> None:
    text = PAGE.read_text(encoding="utf-8")
    anchors = re.findall(r'<a id="([^"]+)"', text)
    assert len(anchors) == len(set(anchors)) > 100
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == set(anchors)
    for file in re.findall(r"\]\(([a-z.-]+\.md)\)", text):
        assert (PAGE.parent / file).exists(), file
    for proto in described.file:
        names = [*proto.message_type, *proto.enum_type, *proto.service]
        assert {f"{proto.package}.{one.name}" for one in names} <= set(anchors)


def test_what_has_no_comment_is_refused(generator: Any, described: FileDescriptorSet) -> None:
    bare = FileDescriptorProto()
    bare.CopyFrom(described.file[0])
    bare.ClearField("source_code_info")
    with pytest.raises(ValueError, match=r"external_processor.proto: .* has no comment"):
        generator.reference([generator.File.of(bare)])
