"""A router whose generations are scripts, with the servers of a real one: health, gRPC and HTTP."""

from contextlib import AsyncExitStack
from typing import Self

from fake_frontend import FakeFrontend
from fake_inference import FakeInference
from gateway import serving
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import ServerConfig
from pageferry.runtime.server import GrpcServer
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

SERVICE = "pageferry.v1.InferenceService"


class FakeRouter:
    """Use it as a context; it is SERVING inside. `address` and `http` are host:port each."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, connection_age_s: float = 0.0) -> None:
        self.frontend = FakeFrontend()
        self.service = FakeInference(self.frontend)
        self.host, self.port = host, port
        self.connection_age_s = connection_age_s
        self.http = ""
        self.server: GrpcServer
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def num_asked(self) -> int:
        return len(self.frontend.requests)

    async def __aenter__(self) -> Self:
        config = ServerConfig(host=self.host, port=self.port, connection_age_s=self.connection_age_s)
        self.server = await self._stack.enter_async_context(GrpcServer(config, NoOpTracer()))
        self.server.add(add_InferenceServiceServicer_to_server, self.service, SERVICE)
        self.port = await self.server.start()
        await self.server.set_serving(True)
        self.http = (await self._stack.enter_async_context(serving(self.frontend))).removeprefix("http://")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
