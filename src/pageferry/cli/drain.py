"""`pageferry drain`: take a service out of work, and wait until nothing is open."""

import argparse
import asyncio

import grpc
from opentelemetry.trace import NoOpTracer

from pageferry.cli.arguments import add_credentials, connection_of
from pageferry.client.connection import certificates
from pageferry.client.request import credentials
from pageferry.core.errors import invalid
from pageferry.runtime.channels import open_channel
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.targets import parse_target
from pageferry.v1.admin_pb2 import DrainRequest, DrainResponse
from pageferry.v1.admin_pb2_grpc import AdminServiceStub

_MAX_GRACE_S = 86_400.0
_EPILOG = (
    "The service is no longer ready and refuses new work; streams and transfers of pages that are open go on. It keeps "
    "running, empty, until it is stopped; SIGTERM does both. The drain goes on if this command is interrupted."
)


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="of one router or worker")
    parser.add_argument(
        "--grace", type=float, metavar="SECONDS", help="for open calls to end; default: the service's own setting"
    )
    add_credentials(parser)
    parser.epilog = _EPILOG
    parser.set_defaults(run=run, called="service")


def run(arguments: argparse.Namespace) -> int:
    if arguments.grace is not None and not 0 <= arguments.grace <= _MAX_GRACE_S:
        raise invalid("--grace", arguments.grace, f"must be from 0 to {_MAX_GRACE_S:g} seconds")
    if parse_target(arguments.address).options:
        raise invalid("--address", arguments.address, "must be host:port of one router or worker")
    return asyncio.run(_drain(arguments))


async def _drain(arguments: argparse.Namespace) -> int:
    request = DrainRequest()
    if arguments.grace is not None:
        request.grace_ms = round(arguments.grace * 1000)
    connection = connection_of(arguments)
    metadata = credentials(connection.pop("api_key"))
    async with open_channel(arguments.address, NoOpTracer(), certificates(**connection)) as channel:
        try:
            async for told in AdminServiceStub(channel).Drain(request, metadata=metadata):
                print(_line(told), flush=True)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    return 0


def _line(told: DrainResponse) -> str:
    if told.HasField("drained"):
        return f"drained; calls that had to be ended: {told.drained.ended_calls}"
    return f"open calls: {told.open_calls}"
