"""An InferenceService in this process that plays a fake frontend's script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fake_frontend as fake
import grpc
from fake_frontend import FakeFrontend
from fake_trace import TRACE_ID, example

from pageferry.core.errors import NotFoundError, PageferryError
from pageferry.runtime.errors import abort
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server


class FakeInference(InferenceServiceServicer):
    def __init__(self, frontend: FakeFrontend) -> None:
        self.frontend = frontend
        self.metadata: dict[str, str | bytes] = {}
        self.trace_error: PageferryError | None = None
        self._asked = asyncio.Event()
        worker = pb.WorkerStatus(role="decode", address="127.0.0.1:7000", state="down", reason="it does not answer")
        worker.load.pages_total, worker.load.pages_free, worker.load.generated_tokens = 64, 60, 512
        self.workers = [worker]

    async def Generate(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        try:
            async for event in self.frontend.generate(request, deadline=None, parent=None):
                yield event
        except PageferryError as error:
            await abort(context, error)

    async def Tokenize(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        text = request.text or "".join(message.content for message in request.chat.messages)
        return pb.TokenizeResponse(ids=[1] * len(text), pieces=list(text))

    async def ListModels(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        return self.frontend.list_models()

    async def GetStatus(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self._asked.set()
        return pb.GetStatusResponse(queued=3, workers=self.workers)

    async def asked_again(self) -> None:
        """Until the status has been asked for, and answered with what it is now."""
        for _ in range(2):
            self._asked.clear()
            await asyncio.wait_for(self._asked.wait(), 60)

    async def GetTrace(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        if request.id == "unknown":
            await abort(context, NotFoundError("trace unknown is not kept"))
        if self.trace_error is not None:
            await abort(context, self.trace_error)
        return pb.GetTraceResponse(trace_id=TRACE_ID.hex(), traces_data=example().SerializeToString())


@asynccontextmanager
async def serving(*script: fake.Step) -> AsyncIterator[tuple[str, FakeInference]]:
    """Address and service."""
    service = FakeInference(FakeFrontend(script or fake.HELLO))
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", service
    finally:
        await server.stop(None)
