"""The InferenceService: the frontend behind gRPC."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from opentelemetry import context as otel_context

from pageferry.router.frontend import Frontend
from pageferry.runtime.rpc_spans import rpc_attributes
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceServicer

_GENERATE = {**rpc_attributes("pageferry.v1.InferenceService/Generate"), "gen_ai.request.stream": True}


class InferenceServicer(InferenceServiceServicer):
    """Errors become statuses in the server's interceptor, which also gives the caller's trace context."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        left_s = context.time_remaining()
        deadline = None if left_s is None else self._frontend.clock() + left_s
        parent = otel_context.get_current()
        events = self._frontend.generate(
            request,
            deadline=deadline,
            parent=parent,
            authorization=authorization_of(context),
            protocol=_GENERATE,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return await self._frontend.tokenize(request, authorization_of(context))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return self._frontend.list_models(authorization_of(context))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return self._frontend.get_status(authorization_of(context))

    async def GetTrace(self, request: pb.GetTraceRequest, context: Any) -> pb.GetTraceResponse:
        return self._frontend.get_trace(request, authorization_of(context))


def authorization_of(context: Any) -> list[str]:
    """The caller's credentials, as they came."""
    return [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
