"""`pageferry status`: workers, pages by state and queues."""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence

from google.protobuf.json_format import MessageToDict
from rich.live import Live
from rich.text import Text

from pageferry.cli.arguments import add_address, connection_of
from pageferry.client import Client
from pageferry.runtime.convert import format_from_proto, groups_from_proto
from pageferry.v1 import inference_pb2 as pb

_REFRESH_S = 0.5
_WORKER_HEADINGS = ("WORKER", "ADDRESS", "STATE", "RUNNING", "WAITING", "TICKETS", "TOKENS")
_POOL_HEADINGS = ("PAGES", "TOTAL", "FREE", "CACHED", "RESERVED", "RESIDENT", "LAYERS")
_PROFILE_HEADINGS = ("PROFILE", "IN EFFECT", "QUEUED", "RUNNING")
# The rest are numbers, and stand to the right.
_TEXTS = {"WORKER", "ADDRESS", "STATE", "PAGES", "LAYERS", "PROFILE", "IN EFFECT"}
_EPILOG = (
    "TICKETS: hand-offs awaited. TOKENS, since the worker's start: of prompts on a prefill worker, generated on a "
    "decode worker. PAGES of each cache group, whose number is `pool` in metrics: FREE ones hold nothing; CACHED ones "
    "may be found by equal prompts, and go where room is needed; RESERVED ones are on their way; RESIDENT ones belong "
    "to sequences; promised ones are kept for running sequences. Tails are last pages, in fp16 until they are full. "
    "PROFILE: as asked for; IN EFFECT: what its requests are served as at present."
)


def add_command(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print the table once; the default where it's no terminal")
    form.add_argument("--json", action="store_true", help="print one object")
    add_address(parser)
    parser.epilog = _EPILOG
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_status(arguments))


def table(status: pb.GetStatusResponse) -> list[str]:
    """The lines: a table of workers, one of their pools, one of profiles, and what is wrong with workers."""
    workers = _aligned(_WORKER_HEADINGS, [_worker_row(worker) for worker in status.workers])
    rows = [list(_pool_rows(worker)) for worker in status.workers]
    headings, *cells = _aligned(_POOL_HEADINGS, [row for pools in rows for row in pools])
    pools = [headings]
    for worker, of_worker in zip(status.workers, rows, strict=True):
        count = len(of_worker)
        pools += [_pages_title(worker), *cells[:count]]
        del cells[:count]
    reasons = [f"{worker.role} {worker.address}: {worker.reason}" for worker in status.workers if worker.reason]
    below = ["", *_profiles(status)] if status.profiles else []
    below += ["", *reasons] if reasons else []
    drains = ", draining" if status.draining else ""
    return [f"router: {status.running} running, {status.queued} queued{drains}", "", *workers, "", *pools, *below]


def _profiles(status: pb.GetStatusResponse) -> list[str]:
    rows = [(one.name, one.in_effect, str(one.queued), str(one.running)) for one in status.profiles]
    return _aligned(_PROFILE_HEADINGS, rows)


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    return [
        "  ".join(
            cell.ljust(width) if heading in _TEXTS else cell.rjust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def _worker_row(worker: pb.WorkerStatus) -> tuple[str, ...]:
    load = worker.load
    done = load.generated_tokens if worker.role == "decode" else load.prefill_tokens
    return (worker.role, worker.address, worker.state, *map(str, (load.running, load.waiting, load.tickets, done)))


def _pages_title(worker: pb.WorkerStatus) -> str:
    name = f"{worker.role} {worker.address}"
    if not worker.HasField("layout"):
        return name
    return f"{name}: {format_from_proto(worker.layout)}, {worker.layout.page_size} tokens a page"


def _pool_rows(worker: pb.WorkerStatus) -> Iterator[tuple[str, ...]]:
    """One for each cache group, and one for tails; a single one of workers that don't say."""
    groups = groups_from_proto(worker.layout) if worker.HasField("layout") else ()
    for pool in worker.load.pools:
        kept = str(groups[pool.group]) if pool.HasField("group") and pool.group < len(groups) else ""
        if pool.pages_promised:
            kept += f" ({pool.pages_promised} promised)"
        yield _pool_row(f"  {pool.group}" if pool.HasField("group") else "  tails", pool, kept)
    if not worker.load.pools:
        yield _pool_row("  all", worker.load, "")


def _pool_row(name: str, pool: pb.PoolLoad | pb.WorkerLoad, kept: str) -> tuple[str, ...]:
    counts = (pool.pages_total, pool.pages_free, pool.pages_cached, pool.pages_reserved, pool.pages_resident)
    return (name, *map(str, counts), kept)


async def _status(arguments: argparse.Namespace) -> int:
    async with Client(arguments.address, **connection_of(arguments)) as client:
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
