"""A name server whose answers a test changes: one name, any number of IPv4 addresses, kept by nobody for long."""

import asyncio
import ipaddress
import struct
from typing import Any, Self

_HEADER = struct.Struct("!6H")
_A, _IN = 1, 1
_ANSWER = 0x8180  # a response to a standard query, no error


class NameServer(asyncio.DatagramProtocol):
    """Use it as a context; `addresses` are what it answers with from now on, whatever name is asked for."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.num_asked = 0
        self.port = 0
        self._transport: Any = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        number = _HEADER.unpack_from(data)[0]
        end = data.index(0, _HEADER.size) + 5  # of the only question: its name, type and class
        (kind,) = struct.unpack_from("!H", data, end - 4)
        records = [
            struct.pack("!HHHIH4s", 0xC000 | _HEADER.size, _A, _IN, 0, 4, ipaddress.IPv4Address(address).packed)
            for address in (self.addresses if kind == _A else ())
        ]
        self.num_asked += kind == _A
        header = _HEADER.pack(number, _ANSWER, 1, len(records), 0, 0)
        self._transport.sendto(b"".join((header, data[_HEADER.size : end], *records)), addr)
