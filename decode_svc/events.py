"""What a step, or a command between steps, has to tell the event loop."""

from dataclasses import dataclass

from pageferry.core.errors import PageferryError
from pageferry.core.plan import Emitted
from pageferry.core.sequence import FinishReason, Sequence
from pageferry.runtime.receive import Grant
from pageferry.runtime.reports import Report
from pageferry.runtime.worker_step import ChunkDone


@dataclass(frozen=True, slots=True)
class Figures:
    """What a sequence took, up to its end, however it ended. Times are seconds of the worker's clock."""

    ready: float  # committed, or accepted where the prompt is computed here
    first_step: float | None  # when its first step began
    first_own: float | None  # when the first token drawn here was there
    ended: float
    forward_s: float  # in the model's forward pass, over all of its steps
    num_steps: int
    num_preemptions: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Completed:
    """The sequence is complete."""

    sequence: Sequence
    reason: FinishReason
    figures: Figures


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over, and incomplete; without figures where it could not run yet."""

    sequence: Sequence
    error: PageferryError
    figures: Figures | None


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """An open push cannot succeed any more: it must be ended, and then closed at the desk."""

    push: Grant
    error: PageferryError


OwnEvent = Emitted | ChunkDone | Completed | Failed | HandoffEnded
Event = OwnEvent | Report
