"""Both schedulers under any order of commands, in pools of a few pages: nothing is lost, and every output is golden.

For each kind of cache: one full group, window and sinks beside it, a window alone, and all with tails.
"""

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_machine import KINDS, PAGE_SIZE, SchedulerMachine

from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.plan import Plan
from pageferry.core.pools import PagePools
from pageferry.core.preemption import max_positions
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sequence import Sequence, SequenceStatus


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
    def make_scheduler(self, pools: PagePools) -> DecodeScheduler:
        return DecodeScheduler(self.config, pools, self.layout)

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
        self.driver.receive(one, with_first=with_first and one not in self.driver.model.failing)

    def receiving(self) -> list[Sequence]:
        return [one for one in self.live if one.status is SequenceStatus.RECEIVING]

    def check_plan(self, plan: Plan) -> None:
        prompts = [chunk for chunk in plan.chunks if chunk.num_tokens > 1 or not chunk.samples]
        assert sum(chunk.num_tokens for chunk in prompts) <= self.config.local_chunk_tokens
        check_page_ends(plan, self.config.local_chunk_tokens)
        assert not {chunk.sequence for chunk in plan.chunks} & {
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


def check_page_ends(plan: Plan, budget: int) -> None:
    for chunk in plan.chunks:
        end = chunk.start + chunk.num_tokens
        assert chunk.samples or end % PAGE_SIZE == 0 or budget < PAGE_SIZE or chunk.start % PAGE_SIZE


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", [PrefillMachine, DecodeMachine])
@pytest.mark.field("vllm-project/vllm#9342")
def test_machine(machine: type[SchedulerMachine], kind: str) -> None:
    run_state_machine_as_test(type(f"{machine.__name__}_{kind}", (machine,), {"kind": kind}), settings=SETTINGS)
