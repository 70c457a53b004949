"""The client without asyncio: the same calls, blocking."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack, cast
from weakref import WeakSet

import grpc
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.client.collector import AnyGeneration
from pageferry.client.connection import certificates
from pageferry.client.request import Message, Options, Prompt, credentials, generate_request, tokenize_request
from pageferry.client.result import Delta, Result
from pageferry.core.errors import PageferryError
from pageferry.runtime.channels import CHANNEL_OPTIONS
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.forks import claim_process, owns_process
from pageferry.runtime.rpc_spans import inject_context
from pageferry.runtime.targets import parse_target
from pageferry.runtime.tls import Certificates, Loaded, channel_credentials, channel_options, check_name
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

_Reply = TypeVar("_Reply")


class SyncGeneration(AnyGeneration):
    """One running generation: iterate over its deltas, or call `result()`.

    The work starts at once and stops everywhere on `break`, `close`, the end of a `with`, or when this object is
    dropped. `cancel` may be called from any thread.
    """

    def __iter__(self) -> Iterator[Delta]:
        """The deltas that have not been read yet. Raises PageferryError."""
        if self._over:
            return
        error: PageferryError | None = None
        try:
            for response in self._call:
                if (delta := self._collector.take(response)) is not None:
                    yield delta
        except grpc.RpcError as raised:
            error = _error(raised)
        except GeneratorExit:
            self._cancelled = True
            raise
        finally:
            told = self._end(error)
        if told is not None:
            raise told

    def result(self) -> Result:
        """Read what is left, and give the whole. Raises PageferryError; CancelledError after a cancel."""
        for _ in self:
            pass
        return self._collector.result()

    def close(self) -> None:
        """As `cancel`."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class SyncClient:
    """Calls a router, or several as `Client` does, blocking; any thread may use it. Close it, or use it as
    `with SyncClient(…) as client`.

    The current OpenTelemetry span, if there is one, becomes the parent of the request's trace. Clients of one `api_key`
    share cached prompts, with no others. The files are as for `Client`.
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
        claim_process()
        self.address = address
        self._metadata = credentials(api_key)
        self._certificates = certificates(ca, cert, key, server_name)
        self._shown = self._certificates.now if self._certificates is not None else None
        self._channel = _open(address, self._certificates, self._shown)
        self._calls: WeakSet[Any] = WeakSet()  # of generations
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it whatever still runs."""
        if owns_process():
            self._channel.close()
            for call in [*self._calls]:  # those on channels of before
                call.cancel()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> SyncGeneration:
        """Start to generate from a text, a list of token ids, or a list of {"role": …, "content": …}.

        A text is continued as it is; a conversation is put into the model's chat template. Raises
        InvalidArgumentError for an option of a wrong type; all else is raised where the generation is read.
        """
        request = generate_request(prompt, options)
        metadata = (*self._metadata, *inject_context().items())
        call = self._stub.Generate(request, timeout=options.get("timeout_s"), metadata=metadata)
        self._calls.add(call)
        return SyncGeneration(call)

    def tokenize(self, text: str | Sequence[Message], *, model: str = "") -> pb.TokenizeResponse:
        """Token ids, and the text of each, of a text or of a conversation in the model's chat template."""
        return self._reply(self._stub.Tokenize, tokenize_request(text, model))

    def models(self) -> list[pb.Model]:
        """The models served."""
        return list(self._reply(self._stub.ListModels, pb.ListModelsRequest()).models)

    def status(self) -> pb.GetStatusResponse:
        """Every worker as the router sees it, and the router's queue."""
        return self._reply(self._stub.GetStatus, pb.GetStatusRequest())

    def trace(self, trace_id: str = "") -> TracesData:
        """A recent trace by its hex id or its request's id; the latest finished one where there is none.

        The router keeps traces only where no collector is configured. Workers' spans come up to a second late.
        """
        return TracesData.FromString(self._reply(self._stub.GetTrace, pb.GetTraceRequest(id=trace_id)).traces_data)

    def _reply(self, method: Callable[..., _Reply], request: object) -> _Reply:
        try:
            return method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error) from None

    @property
    def _stub(self) -> InferenceServiceStub:
        """FailedPreconditionError in a process that was forked from the client's own."""
        claim_process()
        return InferenceServiceStub(self._renewed())

    def _renewed(self) -> grpc.Channel:
        """Another channel where the files have changed. The library closes the old one after its last call."""
        if self._certificates is None:
            return self._channel
        with self._lock:
            loaded = self._certificates.now
            if loaded is not self._shown:
                self._shown, self._channel = loaded, _open(self.address, self._certificates, loaded)
            return self._channel


def _open(address: str, certificates: Certificates | None, loaded: Loaded | None) -> grpc.Channel:
    target = parse_target(address)
    options = (*CHANNEL_OPTIONS, *target.options)
    if certificates is None or loaded is None:
        return grpc.insecure_channel(target.uri, options=options)
    check_name(target, certificates.files)
    options = (*options, *channel_options(certificates.files))
    return grpc.secure_channel(target.uri, channel_credentials(loaded), options=options)


def _error(error: grpc.RpcError) -> PageferryError:
    # Blocking calls raise another class with the same methods.
    return from_rpc_error(cast(grpc.aio.AioRpcError, error), "the router")
