"""The PrefillService as the server knows it, from before the model is there."""

from typing import Any

from pageferry.prefill_svc.worker import PrefillWorker
from pageferry.runtime.work_calls import loading
from pageferry.v1.prefill_pb2 import PrefillRequest
from pageferry.v1.prefill_pb2_grpc import PrefillServiceServicer


class PrefillService(PrefillServiceServicer):
    """Refuses calls with UNAVAILABLE until it is given a worker."""

    def __init__(self, worker: PrefillWorker | None = None) -> None:
        self.worker = worker

    async def Prefill(  # type: ignore[override]  # noqa: N802 - a coroutine that writes by itself
        self, request: PrefillRequest, context: Any
    ) -> None:
        if self.worker is None:
            raise loading()
        await self.worker.prefill(request, context)
