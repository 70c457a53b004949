"""Writes the contract as Envoy's JSON transcoder reads it: `python deploy/envoy/descriptors.py FILE`.

It needs Pageferry installed, and no protoc.
"""

import sys
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pageferry.v1 import inference_pb2

# The service, and what the details of its errors are made of.
ROOTS = (inference_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)


def add(files: FileDescriptorSet, file: FileDescriptor) -> None:
    """Each file once, after those that it imports."""
    for imported in file.dependencies:
        add(files, imported)
    if all(known.name != file.name for known in files.file):
        file.CopyToProto(files.file.add())


def descriptors() -> bytes:
    files = FileDescriptorSet()
    for root in ROOTS:
        add(files, root)
    return files.SerializeToString(deterministic=True)


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(descriptors())
