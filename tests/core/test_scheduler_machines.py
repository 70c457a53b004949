"""Both schedulers under any order of commands, in pools of a few pages: nothing is lost, and every output is golden.

For each kind of cache: one full group, window and sinks beside it, a window alone, and all with tails.
"""

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_machine import CONFIGS, KINDS, PAGE_SIZE, SchedulerMachine
from scheduling import sequence

from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.drafts import DraftSource
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.plan import Plan
from pageferry.core.pools import PagePools
from pageferry.core.preemption import max_positions
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import BeamParams, EarlyStopping
from pageferry.core.sequence import Sequence, SequenceStatus
from pageferry.core.speculation import Speculation


class PrefillMachine(SchedulerMachine):
    def make_scheduler(self, pools: PagePools) -> PrefillScheduler:
        return PrefillScheduler(self.config, pools, self.layout)

    def most_positions(self, one: Sequence) -> tuple[int, int]:
        return len(one.token_ids), self.config.chunk_tokens

    def check_plan(self, plan: Plan) -> None:
        assert plan.num_tokens <= self.config.chunk_tokens
        assert self.driver.scheduler.num_running <= self.config.max_prefills
        check_page_ends(plan, self.config.chunk_tokens)

    def check_complete(self, one: Sequence, tokens: list[int], expected: list[int]) -> None:
        assert len(tokens) == 1


class DecodeMachine(SchedulerMachine):
    num_drafts = 6

    def make_scheduler(self, pools: PagePools) -> DecodeScheduler:
        return DecodeScheduler(self.config, pools, self.layout, Speculation(DraftSource("layers"), self.num_drafts))

    def most_positions(self, one: Sequence) -> tuple[int, int]:
        return max_positions(one), self.config.local_chunk_tokens

    @property
    def scheduler(self) -> DecodeScheduler:
        assert isinstance(self.driver.scheduler, DecodeScheduler)
        return self.driver.scheduler

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        one = self.make_sequence(data)
        num_reserved, num_preempted = self.driver.pools.num_reserved, sum(other.num_preemptions for other in self.live)
        try:
            reserved = self.scheduler.reserve(one, self.driver.now)
        except InvalidArgumentError:
            assert not self.fits(one)
            return
        if reserved:
            self.live.append(one)
            assert one.num_cached % PAGE_SIZE == 0
            assert one.num_cached < len(one.token_ids)
        else:
            assert (one.tables, self.driver.pools.num_reserved) == ([], num_reserved)
            assert num_preempted == sum(other.num_preemptions for other in self.live)

    @precondition(lambda self: self.receiving())
    @rule(data=st.data(), with_first=st.booleans())
    def activate(self, data: st.DataObject, with_first: bool) -> None:
        one = data.draw(st.sampled_from(self.receiving()))
        has_first = with_first and one not in self.driver.model.failing and one.work.beam is None
        self.driver.receive(one, with_first=has_first)

    def receiving(self) -> list[Sequence]:
        return [one for one in self.live if one.status is SequenceStatus.RECEIVING]

    def check_plan(self, plan: Plan) -> None:
        prompts = [chunk for chunk in plan.chunks if chunk.num_tokens > 1 or not chunk.samples]
        num_drafts = [chunk.num_drafts for chunk in plan.chunks]
        num_prompt_tokens = sum(chunk.num_tokens for chunk in prompts)
        assert num_prompt_tokens + sum(num_drafts) <= self.config.local_chunk_tokens
        assert max(num_drafts) <= self.num_drafts
        check_page_ends(plan, self.config.local_chunk_tokens)
        assert not {chunk.sequence.owner for chunk in plan.chunks} & {
            one for one in plan.preempted if one.status is not SequenceStatus.RUNNING
        }
        assert len(plan.chunks) <= self.config.max_num_seqs

    def finish(self) -> None:
        # A receiving one whose sender is silent is the tickets' to expire, and holds its slot and pages until then.
        self.end_step()
        for one in self.receiving():
            self.scheduler.abort(one)
            self.live.remove(one)
        super().finish()

    def check_complete(self, one: Sequence, tokens: list[int], expected: list[int]) -> None:
        if one in self.driver.ended and one not in self.driver.model.failing:
            assert len(tokens) == len(expected)


class BeamMachine(DecodeMachine):
    """Mostly beam searches, in pools that hold a few of them."""

    @initialize(
        config=CONFIGS,
        max_num_seqs=st.integers(3, 9),
        num_pages=st.lists(st.integers(8, 30), min_size=3, max_size=3),
        num_tails=st.integers(3, 9),
    )
    def start(self, config: dict[str, float], max_num_seqs: int, num_pages: list[int], num_tails: int) -> None:
        self.begin({**config, "max_num_seqs": max_num_seqs, "max_waiting": 6}, num_pages, num_tails)

    def make_sequence(self, data: st.DataObject) -> Sequence:
        plain = super().make_sequence(data)
        width = data.draw(st.integers(0, 4))
        if width == 0:
            return plain
        early_stopping = data.draw(st.sampled_from(EarlyStopping))
        return sequence(
            plain.work.prompt_ids,
            max_tokens=plain.work.stop.max_tokens,
            priority=plain.work.priority,
            arrival=plain.arrival,
            deadline=plain.deadline,
            beam=BeamParams(width, data.draw(st.sampled_from([0.0, 1.0])), early_stopping),
            stop_token_ids=data.draw(st.sampled_from([(), range(0, 64, 9)])),
        )

    def fits(self, one: Sequence) -> bool:
        return one.num_slots <= self.config.max_num_seqs and super().fits(one)


def check_page_ends(plan: Plan, budget: int) -> None:
    for chunk in plan.chunks:
        end = chunk.start + chunk.num_tokens
        is_beams_last = chunk.sequence.root is not None and chunk.sequence.num_remaining == chunk.num_tokens + 1
        is_end = chunk.samples or is_beams_last or end % PAGE_SIZE == 0
        assert is_end or budget < PAGE_SIZE or chunk.start % PAGE_SIZE


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", [PrefillMachine, DecodeMachine, BeamMachine])
@pytest.mark.field("vllm-project/vllm#9342")
def test_machine(machine: type[SchedulerMachine], kind: str) -> None:
    run_state_machine_as_test(type(f"{machine.__name__}_{kind}", (machine,), {"kind": kind}), settings=SETTINGS)
