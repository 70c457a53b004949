"""A channel over TLS that shows each new call's connection what the certificate files hold then.

The library reads certificates once a channel, so that a change needs another one: calls that are under way go on on the
old one, which is closed after the last of them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import grpc

from pageferry.runtime.targets import Target
from pageferry.runtime.tls import Certificates, Loaded, channel_credentials, channel_options

Options = tuple[tuple[str, int | str], ...]


@dataclass(slots=True, eq=False)
class _Connection:
    """One channel of the library's, and the number of calls on it."""

    channel: grpc.aio.Channel
    loaded: Loaded
    num_live: int = 0


class SecureChannel(grpc.aio.Channel):
    """Needs a running loop where it is opened."""

    def __init__(self, target: Target, options: Options, certificates: Certificates, name: str = "") -> None:
        """`name` is the server's, where neither the certificates' files nor the target say it."""
        self._uri = target.uri
        self._options = (*options, *channel_options(certificates.files, name))
        self._certificates = certificates
        self._current = self._open()
        self._retired: set[_Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._made("unary_unary", method, args, kwargs)

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._made("unary_stream", method, args, kwargs)

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._made("stream_unary", method, args, kwargs)

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._made("stream_stream", method, args, kwargs)

    async def close(self, grace: float | None = None) -> None:
        for connection in (self._current, *self._retired):
            await connection.channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current.channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self) -> _Connection:
        loaded = self._certificates.now
        channel = grpc.aio.secure_channel(self._uri, channel_credentials(loaded), options=self._options)
        return _Connection(channel, loaded)

    def _made(self, kind: str, method: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
        def begin(*call_args: Any, **call_options: Any) -> Any:
            connection = self._renewed()
            call = getattr(connection.channel, kind)(method, *args, **kwargs)(*call_args, **call_options)
            connection.num_live += 1
            call.add_done_callback(lambda _: self._ended(connection))
            return call

        return begin

    def _renewed(self) -> _Connection:
        """The connection for a new call: another one where the files have changed."""
        old = self._current
        if self._certificates.now is not old.loaded:
            self._current = self._open()
            self._retired.add(old)
            self._close_idle(old)
        return self._current

    def _ended(self, connection: _Connection) -> None:
        connection.num_live -= 1
        self._close_idle(connection)

    def _close_idle(self, connection: _Connection) -> None:
        if connection in self._retired and not connection.num_live:
            self._retired.remove(connection)
            closing = asyncio.get_running_loop().create_task(connection.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
