"""A worker's process whose model is a clock: all of a worker but the forward pass, which is a wait.

    python bench/paced_workers.py decode|prefill --step-ms 20 --set server.port=… --set telemetry.otlp_endpoint=…

The token at a position is `token_at(position)`, whatever the prompt.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from fake_engine import FakePages

from pageferry.core.config import Config
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import load_config_of, resolve_model
from pageferry.core.plan import Plan, SampledToken, StepResult
from pageferry.decode_svc.__main__ import DecodeMain
from pageferry.prefill_svc.__main__ import PrefillMain
from pageferry.runtime.process import run_service
from pageferry.runtime.worker_main import LoadedEngine
from pageferry.runtime.worker_process import serve_worker

NUM_PAGES = 16384
LAYOUT = CacheLayout(
    "f" * 32, PageFormat.parse("int8"), page_size=16, num_kv_heads=1, head_dim=8, groups=(full_group(1),)
)


def token_at(position: int) -> int:
    """Ids of the packaged model that are no special ones; some are parts of characters."""
    return 1000 + position * 7919 % 40_000


@dataclass(slots=True)
class ClockRunner:
    """Its steps begin `step_s` apart, or at once where the engine is late."""

    step_s: float
    due: float = 0.0

    def run(self, plan: Plan) -> StepResult:
        now = time.monotonic()
        if self.due > now:
            time.sleep(self.due - now)
        self.due = max(self.due, now - 5 * self.step_s) + self.step_s
        samples = ((SampledToken(token_at(chunk.sequence.num_output)),) for chunk in plan.chunks if chunk.samples)
        return StepResult(tuple(samples))


@dataclass(slots=True)
class ClockEngine:
    model_config: ModelConfig
    runner: ClockRunner
    layout: CacheLayout = LAYOUT
    num_pages: tuple[int, ...] = (NUM_PAGES,)
    num_tails: int = 0
    memory_report: dict[str, int] = field(default_factory=dict)
    pages: FakePages = field(default_factory=lambda: FakePages(LAYOUT, NUM_PAGES))

    def warm_up(self) -> None:
        return


def main() -> int:
    role, _, step_ms, *settings = sys.argv[1:]

    def load_engine(config: Config, progress: Callable[[str], None]) -> LoadedEngine:
        return ClockEngine(load_config_of(resolve_model(config.engine.model)), ClockRunner(float(step_ms) / 1000))

    worker = DecodeMain() if role == "decode" else PrefillMain()
    worker.load_engine = load_engine  # type: ignore[method-assign]
    return run_service(lambda config, stop: serve_worker(config, stop, worker), name=role, arguments=settings)


if __name__ == "__main__":
    sys.exit(main())
