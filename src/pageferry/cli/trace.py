"""`pageferry trace`: a recent request's trace as a waterfall."""

import argparse
import asyncio
import json
import shutil
import sys
import time
from typing import TextIO

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.cli import waterfall
from pageferry.cli.arguments import add_address, connection_of
from pageferry.client import Client
from pageferry.core.errors import NotFoundError
from pageferry.runtime import span_trees

LATE_SPANS_S = 3.0  # workers export a little after a request has ended
_POLL_S = 0.1


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", nargs="?", default="last", metavar="ID", help="trace id, request id, or last (the default)"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    add_address(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_trace(arguments))


async def whole_trace(client: Client, trace_id: str) -> TracesData:
    """The trace once all its spans have come, or what there is of it after `LATE_SPANS_S`. Raises NotFoundError."""
    end = time.monotonic() + LATE_SPANS_S
    while True:
        late = time.monotonic() >= end
        try:
            data = await client.trace(trace_id)
        except NotFoundError as error:
            if error.reason == "NO_TRACE_STORE" and trace_id:
                raise NotFoundError(f"{error.message}; look there for {trace_id}", reason=error.reason) from None
            if late or error.reason == "NO_TRACE_STORE":
                raise
        else:
            if late or span_trees.is_whole(data):
                return data
        await asyncio.sleep(_POLL_S)


def show(data: TracesData, out: TextIO) -> None:
    """Print the waterfall, as wide as the terminal where it is one."""
    width = shutil.get_terminal_size().columns if out.isatty() else None
    head, *lines = waterfall.render(data, max_width=width)
    print(f"trace {trace_id_of(data)}: {head}", *lines, sep="\n", file=out)
    if not span_trees.is_whole(data):
        print("not all spans have come: a service sends them elsewhere, or died with them", file=out)


def trace_id_of(data: TracesData) -> str:
    """Hex; empty for a trace without spans."""
    spans = (span for resource in data.resource_spans for scope in resource.scope_spans for span in scope.spans)
    return next((span.trace_id.hex() for span in spans), "")


async def _trace(arguments: argparse.Namespace) -> int:
    async with Client(arguments.address, **connection_of(arguments)) as client:
        data = await whole_trace(client, "" if arguments.id == "last" else arguments.id)
    if arguments.json:
        print(json.dumps({"trace_id": trace_id_of(data), "spans": span_trees.as_json(data)}, ensure_ascii=False))
    else:
        show(data, sys.stdout)
    return 0
