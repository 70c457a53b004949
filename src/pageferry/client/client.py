"""The asyncio client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.client.collector import AnyGeneration
from pageferry.client.connection import certificates
from pageferry.client.request import Message, Options, Prompt, credentials, generate_request, tokenize_request
from pageferry.client.result import Delta, Result
from pageferry.core.errors import PageferryError
from pageferry.runtime.channels import open_channel
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.forks import claim_process
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:  # a type of the stubs only
    from pageferry.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_Reply = TypeVar("_Reply")


class Generation(AnyGeneration):
    """One running generation: iterate over its deltas, or await `result()`.

    The work starts at once and stops everywhere when it is no longer wanted: on `break`, `aclose`, `cancel`, the end of
    an `async with`, cancellation of the task that iterates, and when this object is dropped.
    """

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas that have not been read yet; one reader at a time. Raises PageferryError."""
        return self._deltas()

    async def result(self) -> Result:
        """Read what is left, and give the whole. Raises PageferryError; CancelledError after a cancel."""
        async for _ in self:
            pass
        return self._collector.result()

    async def aclose(self) -> None:
        """Stop the work and wait until the call has ended on this side."""
        self.cancel()
        await self._call.code()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        if self._over:
            return
        error: PageferryError | None = None
        try:
            async for response in self._call:
                if (delta := self._collector.take(response)) is not None:
                    yield delta
        except grpc.aio.AioRpcError as raised:
            error = from_rpc_error(raised, "the router")
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
        except GeneratorExit:
            self._cancelled = True
            raise
        finally:
            told = self._end(error)
        if told is not None:
            raise told


class Client:
    """Calls a router. Use it as `async with Client("127.0.0.1:50051") as client`.

    Several routers are named as "10.0.0.1:50051,10.0.0.2:50051", or as "dns:///name:50051" where a name stands for
    them: calls go to those that are ready, in turn, and one that a router could not begin is made again on another.
    The current OpenTelemetry span, if there is one, becomes the parent of the request's trace. Clients of one `api_key`
    share cached prompts, with no others; where the router knows tenants, it must be one's. With `ca`, a PEM file of who
    signs the router's certificate, the connection is encrypted; `cert` and `key` are the client's own, where the router
    wants them. The files are read again when they change. `server_name` is a name in the router's certificate, where
    that isn't the address's host.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: str = "",
        ca: str = "",
        cert: str = "",
        key: str = "",
        server_name: str = "",
    ) -> None:
        """Raises InvalidArgumentError where a file can't be used."""
        self.address = address
        self._metadata = credentials(api_key)
        self._certificates = certificates(ca, cert, key, server_name)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        claim_process()
        self._channel = open_channel(self.address, trace.get_tracer("pageferry.client"), self._certificates)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection, and with it whatever still runs."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Start to generate from a text, a list of token ids, or a list of {"role": …, "content": …}.

        A text is continued as it is; a conversation is put into the model's chat template. Raises
        InvalidArgumentError for an option of a wrong type; all else is raised where the generation is read.
        """
        request = generate_request(prompt, options)
        call = self._stub.Generate(request, timeout=options.get("timeout_s"), metadata=self._metadata)
        return Generation(call)

    async def tokenize(self, text: str | Sequence[Message], *, model: str = "") -> pb.TokenizeResponse:
        """Token ids, and the text of each, of a text or of a conversation in the model's chat template."""
        return await _reply(self._stub.Tokenize(tokenize_request(text, model), metadata=self._metadata))

    async def models(self) -> list[pb.Model]:
        """The models served."""
        reply = await _reply(self._stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata))
        return list(reply.models)

    async def is_serving(self) -> bool:
        """Whether requests can be served now; to be asked without an API key, too."""
        check = HealthStub(self._open_channel).Check(HealthCheckRequest())
        return bool((await _reply(check)).status == HealthCheckResponse.SERVING)

    async def status(self) -> pb.GetStatusResponse:
        """Every worker as the router sees it, and the router's queue."""
        return await _reply(self._stub.GetStatus(pb.GetStatusRequest(), metadata=self._metadata))

    async def trace(self, trace_id: str = "") -> TracesData:
        """A recent trace by its hex id or its request's id; the latest finished one where there is none.

        The router keeps traces only where no collector is configured. Workers' spans come up to a second late.
        """
        request = pb.GetTraceRequest(id=trace_id)
        response = await _reply(self._stub.GetTrace(request, metadata=self._metadata))
        return TracesData.FromString(response.traces_data)

    @property
    def _stub(self) -> "InferenceServiceAsyncStub":
        return InferenceServiceStub(self._open_channel)

    @property
    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open; use it as `async with Client(…) as client`")
        claim_process()
        return self._channel


async def _reply(call: Awaitable[_Reply]) -> _Reply:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "the router") from None
