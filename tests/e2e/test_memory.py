"""Pools sized from the memory that is there, in real processes that share it."""

from pathlib import Path

import pytest
from cluster import connected, generate, greedy, running, wait_idle


@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
async def test_without_a_size_workers_share_the_memory_and_take_what_all_sequences_need(tiny_model: Path) -> None:
    settings = {"engine.kv_memory_mb": "0", "scheduler.max_num_seqs": "4"}
    options = ("--prefill", "1", "--decode", "2", "--model", str(tiny_model))
    with running(*options, settings=settings) as cluster:
        async with connected(cluster) as stub:
            answer = await generate(stub, greedy([9] * 100, 4))
            assert len(answer.token_ids) == 4
            status = await wait_idle(stub)
        assert [worker.load.pages_total for worker in status.workers] == [4 * 4096 // 16] * 3
        sums = [line for line in cluster.output.splitlines() if "memory weights" in line]
    assert len(sums) == 3
    assert all("rotary" in line and "workspace" in line and "pages" in line for line in sums)
    assert sum("staging 268" in line or "staging 269" in line for line in sums) == 2, "of the two that receive pages"
