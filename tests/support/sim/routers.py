"""A simulated router: its own code, over a fleet of simulated workers."""

from dataclasses import replace
from typing import Any

from opentelemetry.trace import Tracer
from tokenizers import Tokenizer as Encoder
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend
from pageferry.router.metrics import RouterMetrics
from pageferry.router.running import Running
from pageferry.router.service import InferenceServicer
from pageferry.router.telemetry import Telemetry
from pageferry.runtime.channels import open_channel
from pageferry.runtime.names import Resolve
from pageferry.runtime.server import GrpcServer
from pageferry.text.chat_template import ChatTemplate
from pageferry.text.tokenizer import Tokenizer
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from sim.engine import MODEL
from sim.nodes import Node
from sim.process import Process
from sim.workers import PrefillNode, WorkerNode


class RouterNode(Node):
    def __init__(self, *args: Any, prefill: list[str], decode: list[str], resolve: Resolve) -> None:
        super().__init__(*args)
        self._workers = (prefill, decode)
        self._resolve = resolve

    async def _serve(self, process: Process, tracer: Tracer) -> None:
        prefill, decode = self._workers
        router = replace(self.settings.router, prefill=tuple(prefill), decode=tuple(decode))
        config = replace(self.config, router=router, scheduler=self.settings.scheduler)
        self.metrics = RouterMetrics()
        fleet = Fleet(
            prefill,
            decode,
            lambda address, _: open_channel(address, tracer),
            model=MODEL.name,
            discovery_s=router.discovery_s,
            resolve=self._resolve,
        )
        telemetry = Telemetry(tracer, self.metrics)
        self.frontend = Frontend(config, MODEL, _tokenizer(), fleet, telemetry, clock=self.loop.time)
        async with GrpcServer(config.server, tracer) as self.server:
            name = "pageferry.v1.InferenceService"
            self.server.add(add_InferenceServiceServicer_to_server, InferenceServicer(self.frontend), name)
            await self.server.start()
            self.fleet = fleet
            self.is_started = True
            try:
                await Running(config.server, self.server, self.frontend, fleet).until(self.stop)
            finally:
                await fleet.close()

    def knows(self, node: WorkerNode) -> bool:
        """Whether it sees the worker that is there now as ready, with its stream of tokens."""
        worker = next((worker for worker in self.fleet.workers if worker.address == node.address), None)
        if worker is None:
            return False
        is_fed = worker.feed.is_live or isinstance(node, PrefillNode)
        return worker.is_ready and worker.view.incarnation == node.incarnation and is_fed

    def forget(self) -> None:
        self.is_started = False

    def leftovers(self) -> list[str]:
        if not self.is_started:
            return []
        status = self.frontend.get_status()
        counts = {"queued": status.queued, "running": status.running, "live": len(self.frontend._live)}
        for worker in self.fleet.workers:
            counts[f"uncounted at {worker.address}"] = len(worker.view.uncounted)
            counts[f"fed calls at {worker.address}"] = worker.feed.num_calls
        counts["streams"] = len(self.live_calls())
        return super().leftovers() + [f"{number} {what}" for what, number in counts.items() if number]


def _tokenizer() -> Tokenizer:
    words = {f"w{number}.": number for number in range(MODEL.vocab_size)}
    encoder = Encoder(WordLevel(words, unk_token="w0."))
    encoder.decoder = ByteLevel()
    return Tokenizer(encoder, template=ChatTemplate(None, {}), eos_ids=(), bos_id=None)
