"""`pageferry status`: workers, pages by state and queues."""

import argparse
import asyncio
import json
import sys

from google.protobuf.json_format import MessageToDict
from rich.live import Live
from rich.text import Text

from pageferry.cli.arguments import add_address
from pageferry.client import Client
from pageferry.v1 import inference_pb2 as pb

_REFRESH_S = 0.5
_HEADINGS = (
    *("WORKER", "ADDRESS", "STATE", "RUNNING", "WAITING", "TICKETS"),
    *("PAGES", "FREE", "CACHED", "RESERVED", "RESIDENT", "TOKENS"),
)
_NUM_TEXT_COLUMNS = 3  # the rest are numbers, and stand to the right


def add_command(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print the table once; the default where it's no terminal")
    form.add_argument("--json", action="store_true", help="print one object")
    add_address(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_status(arguments))


def table(status: pb.GetStatusResponse) -> list[str]:
    """The table's lines."""
    rows = [_HEADINGS, *(_row(worker) for worker in status.workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < _NUM_TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    reasons = [f"{worker.role} {worker.address}: {worker.reason}" for worker in status.workers if worker.reason]
    return [f"router: {status.running} running, {status.queued} queued", *lines, *reasons]


def _row(worker: pb.WorkerStatus) -> tuple[str, ...]:
    load = worker.load
    done = load.generated_tokens if worker.role == "decode" else load.prefill_tokens
    counts = (load.running, load.waiting, load.tickets)
    pages = (load.pages_total, load.pages_free, load.pages_cached, load.pages_reserved, load.pages_resident)
    return (worker.role, worker.address, worker.state, *map(str, (*counts, *pages, done)))


async def _status(arguments: argparse.Namespace) -> int:
    async with Client(arguments.address) as client:
        status = await client.status()
        if arguments.json:
            print(
                json.dumps(
                    MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
                )
            )
        elif arguments.once or not sys.stdout.isatty():
            print(*table(status), sep="\n")
        else:
            await _watch(client, status)
    return 0


async def _watch(client: Client, status: pb.GetStatusResponse) -> None:
    with Live(_text(status), auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_REFRESH_S)
            live.update(_text(await client.status()), refresh=True)


def _text(status: pb.GetStatusResponse) -> Text:
    text = Text("\n".join(table(status)), overflow="fold")
    text.highlight_words(["ready"], "green")
    text.highlight_words(["warming", "draining", "stale"], "yellow")
    text.highlight_words(["down", "refused"], "red")
    return text
