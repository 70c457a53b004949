"""The DecodeService and the PageService as the server knows them, from before the model is there."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pageferry.core.layout import PageSink
from pageferry.decode_svc.worker import DecodeWorker
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.work_calls import loading
from pageferry.v1.decode_pb2 import DecodeRequest
from pageferry.v1.decode_pb2_grpc import DecodeServiceServicer
from pageferry.v1.page_pb2_grpc import PageServiceServicer


class DecodeService(DecodeServiceServicer, PageServiceServicer):
    """Refuses calls with UNAVAILABLE until it is given a worker."""

    def __init__(self) -> None:
        self._worker: DecodeWorker | None = None
        self._receiver: PageReceiver | None = None

    def attach(self, worker: DecodeWorker, sink: PageSink, executor: ThreadPoolExecutor) -> None:
        """Serve with this worker; `sink` holds its pages, `executor` is the one transfer thread."""
        self._receiver = PageReceiver(worker.desk, sink, executor)
        self._worker = worker

    async def Decode(  # type: ignore[override]  # noqa: N802 - a coroutine that writes by itself
        self, request: DecodeRequest, context: Any
    ) -> None:
        if self._worker is None:
            raise loading()
        await self._worker.decode(request, context)

    async def Push(  # type: ignore[override]  # noqa: N802 - a coroutine that reads and writes by itself
        self, request_iterator: Any, context: Any
    ) -> None:
        if self._receiver is None:
            raise loading()
        await self._receiver.Push(request_iterator, context)
