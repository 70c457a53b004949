"""Addresses behind names, as this machine's resolver gives them."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

# A host's name to its addresses, none where it has none; OSError where that can't be told.
Resolve = Callable[[str], Awaitable[frozenset[str]]]

# Not every system's library knows them all.
_NO_ADDRESS = {
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)
}
_MAX_LOOKUPS = 8  # at once; one may take half a minute where no server answers


def system_resolver() -> Resolve:
    """On threads of its own: the event loop never waits for a lookup, nor does the end of the process."""
    threads = ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="names")

    async def resolve(host: str) -> frozenset[str]:
        return await asyncio.get_running_loop().run_in_executor(threads, _look_up, host)

    return resolve


def _look_up(host: str) -> frozenset[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return frozenset()
        raise
    return frozenset(str(address[0]) for *_, address in found)
