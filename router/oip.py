"""The Open Inference Protocol on the router: the frontend for clients of KServe and Triton."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from opentelemetry import context as otel_context

from pageferry import __version__
from pageferry.core.errors import InternalError, NotFoundError, PageferryError
from pageferry.oip import open_inference_pb2 as oip
from pageferry.oip.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from pageferry.router.admission import MAX_MODEL_CHARACTERS
from pageferry.router.frontend import Frontend
from pageferry.router.oip_reply import Reply, failure
from pageferry.router.oip_request import FINISH_REASON, TEXT_INPUT, TEXT_OUTPUT, VERSION, check_version, parse_infer
from pageferry.router.service import authorization_of
from pageferry.runtime.rpc_spans import rpc_attributes
from pageferry.v1 import inference_pb2 as pb

OIP_SERVICE = "inference.GRPCInferenceService"
_METHODS = {streams: f"{OIP_SERVICE}/Model{'Stream' * streams}Infer" for streams in (False, True)}
_NAME = "pageferry"
_EXTENSIONS = ("parameters", "schedule_policy")  # the latter: the parameters `priority` and `timeout`
_MAX_AT_ONCE = 256  # requests of a stream; the next one is read when one of them is over
_AS_STATUS = "triton_grpc_error"  # metadata by which a client wants the stream ended by an error's status


class OpenInferenceServicer(GRPCInferenceServiceServicer):
    """Errors become statuses in the server's interceptor; in a stream they are the answer to their request."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Any) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Any) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._frontend.ready)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Any) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name=_NAME, version=__version__, extensions=_EXTENSIONS)

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Any) -> oip.ModelReadyResponse:
        return oip.ModelReadyResponse(ready=self._model(request.name, request.version, context).ready)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Any) -> oip.ModelMetadataResponse:
        model = self._model(request.name, request.version, context)

        def tensor(name: str, size: int) -> oip.ModelMetadataResponse.TensorMetadata:
            return oip.ModelMetadataResponse.TensorMetadata(name=name, datatype="BYTES", shape=[size])

        return oip.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform=_NAME,
            inputs=[tensor(TEXT_INPUT, 1)],
            outputs=[tensor(TEXT_OUTPUT, -1), tensor(FINISH_REASON, -1)],
        )

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        self._frontend.check_caller(authorization_of(context))  # before more is done for a stranger
        async with aclosing(self._answers(request, context, streams=False)) as answers:
            async for answer in answers:
                return answer
        raise InternalError("the generation ended without a finish", reason="NO_FINISH")

    # A coroutine, since several requests' answers are written as they come.
    async def ModelStreamInfer(  # type: ignore[override]
        self, requests: AsyncIterator[oip.ModelInferRequest], context: Any
    ) -> None:
        self._frontend.check_caller(authorization_of(context))
        room, writing = asyncio.Semaphore(_MAX_AT_ONCE), asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await room.acquire()
                    task = group.create_task(self._serve(request, context, writing))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _serve(self, request: oip.ModelInferRequest, context: Any, writing: asyncio.Lock) -> None:
        """One request of a stream."""

        async def write(message: oip.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(message)

        try:
            async with aclosing(self._answers(request, context, streams=True)) as answers:
                async for answer in answers:
                    await write(oip.ModelStreamInferResponse(infer_response=answer))
        except PageferryError as error:
            if (_AS_STATUS, "true") in (context.invocation_metadata() or ()):
                raise
            await write(failure(request, error))

    async def _answers(
        self, request: oip.ModelInferRequest, context: Any, *, streams: bool
    ) -> AsyncGenerator[oip.ModelInferResponse, None]:
        """Answers as they come, the last one saying so; or the whole one."""
        inference = parse_infer(request, streams=streams)
        events = self._frontend.generate(
            inference.generate,
            deadline=self._deadline(context.time_remaining(), inference.timeout_s),
            parent=otel_context.get_current(),
            authorization=authorization_of(context),
            protocol={**rpc_attributes(_METHODS[streams]), "gen_ai.request.stream": streams},
        )
        async with aclosing(events):
            reply = Reply(inference, (await anext(events)).started)
            async for event in events:
                answer = reply.take(event)
                if answer is not None:
                    yield answer

    def _deadline(self, *lefts_s: float | None) -> float | None:
        known = [left_s for left_s in lefts_s if left_s is not None]
        return self._frontend.clock() + min(known) if known else None

    def _model(self, name: str, version: str, context: Any) -> pb.Model:
        """Raises NotFoundError."""
        check_version(name, version)
        for model in self._frontend.list_models(authorization_of(context)).models:
            if name in ("", model.name):
                return model
        raise NotFoundError(f"model {name[:MAX_MODEL_CHARACTERS]!r} is not served", reason="MODEL_NOT_FOUND")
