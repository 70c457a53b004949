"""A Pageferry router over gRPC, by the generated stub: the client library builds more than load needs."""

from time import perf_counter
from typing import TYPE_CHECKING

import grpc
from opentelemetry.trace import NoOpTracer

from pageferry.client.request import credentials
from pageferry.core.errors import FailedPreconditionError, NotFoundError, UnauthenticatedError, UnavailableError
from pageferry.loadgen.result import Target as TargetInfo
from pageferry.loadgen.target import Answer, Question, RequestFailedError, ServerLoad
from pageferry.runtime.channels import open_channel
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.tls import Certificates
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:  # a type of the stubs only
    from pageferry.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_CHECK_TIMEOUT_S = 10


class GrpcTarget:
    """One channel for all requests, as a client of many users has it."""

    def __init__(
        self,
        address: str,
        *,
        model: str,
        api_key: str,
        temperature: float,
        chat: bool,
        certificates: Certificates | None = None,
    ) -> None:
        self._address = address
        self._model = model
        self._metadata = credentials(api_key)
        self._temperature = temperature
        self._chat = chat
        self._channel = open_channel(address, NoOpTracer(), certificates)
        self._stub: InferenceServiceAsyncStub = InferenceServiceStub(self._channel)

    @property
    def info(self) -> TargetInfo:
        return TargetInfo("grpc", self._address, self._model)

    async def prepare(self) -> list[str]:
        try:
            reply = await self._stub.ListModels(
                pb.ListModelsRequest(), timeout=_CHECK_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error, "the router")
            if isinstance(known, UnauthenticatedError):
                raise UnauthenticatedError(f"{known.message}; set --api-key", reason=known.reason) from None
            what_to_do = "start one with `pageferry up`, or name another with --target"
            message = f"no router answers at {self._address}; {what_to_do} ({known.message})"
            raise UnavailableError(message, reason=known.reason) from None
        models = {model.name: model for model in reply.models}
        model = models.get(self._model or next(iter(models), ""))
        if model is None:
            raise NotFoundError(f"{self._address} serves no model {self._model!r}, but {', '.join(models) or 'none'}")
        if not model.ready:
            raise FailedPreconditionError(f"{self._address} is not ready to serve {model.name} yet")
        self._model = model.name
        return []

    async def ask(self, question: Question, answer: Answer) -> float:
        call = self._stub.Generate(self._request(question), metadata=self._metadata)
        try:
            async for response in call:
                if response.HasField("delta"):
                    if response.delta.tokens:
                        answer.take_piece(perf_counter())
                elif response.HasField("finished"):
                    usage = response.finished.usage
                    answer.input_tokens = usage.prompt_tokens
                    answer.output_tokens = usage.completion_tokens
                    answer.cached_tokens = usage.cached_tokens
                    return perf_counter()
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error, "the router")
            raise RequestFailedError(f"{known.code}: {known.message}") from None
        finally:
            call.cancel()  # does nothing to one that is over
        raise RequestFailedError("the stream ended without a terminal event")

    async def server_load(self) -> ServerLoad | None:
        try:
            status = await self._stub.GetStatus(
                pb.GetStatusRequest(), timeout=_CHECK_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return None
        loads = [worker.load for worker in status.workers if worker.role == "decode"]
        return ServerLoad(
            running=sum(load.running for load in loads),
            waiting=status.queued + sum(worker.load.waiting for worker in status.workers),
            batch_sizes=tuple(load.running for load in loads),
            pages_used=sum(load.pages_reserved + load.pages_resident for load in loads),
            pages_total=sum(load.pages_total for load in loads),
        )

    async def close(self) -> None:
        await self._channel.close()

    def _request(self, question: Question) -> pb.GenerateRequest:
        request = pb.GenerateRequest(model=self._model)
        if self._chat:
            request.chat.messages.add(role="user", content=question.prompt)
        else:
            request.prompt = question.prompt
        request.sampling.temperature = self._temperature
        if question.seed is not None:
            request.sampling.seed = question.seed
        request.stop.max_tokens = request.stop.min_tokens = question.output_tokens
        request.stop.ignore_eos = True
        return request
