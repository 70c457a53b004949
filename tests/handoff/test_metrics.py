"""What both ends of a hand-off count: the same pages and bytes, by how they travelled, and why it broke off."""

import pytest
from fake_engine import LAYOUT
from handoff_bench import Bench, Gate, Settings, Side, failure, until

from pageferry.core.config import HandoffConfig

B = LAYOUT.page_size
FRAME_BYTES = sum(length for _, length in LAYOUT.pages[0].ranges(0, LAYOUT.num_layers))


def value(side: Side, name: str, **labels: str) -> float | None:
    return side.publisher.metrics.registry.get_sample_value(f"pageferry_{name}", labels)


@pytest.mark.parametrize(("transport", "other"), [("inline", "shm"), ("shm", "inline")])
async def test_both_ends_count_the_same_by_transport(transport: str, other: str) -> None:
    async with Bench(Settings(handoff=HandoffConfig(transport=transport))) as bench:
        for number in (1, 2):
            await bench.generate(f"r{number}", range(100 * number, 100 * number + 2 * B + 1))
        await bench.until_idle()
        for side, direction in ((bench.p, "sent"), (bench.d, "received")):
            assert value(side, "handoff_pages_total", direction=direction, transport=transport) == 6
            assert value(side, "handoff_bytes_total", direction=direction, transport=transport) == 6 * FRAME_BYTES
            assert value(side, "handoff_pages_total", direction=direction, transport=other) == 0
        assert value(bench.p, "handoff_seconds_count", transport=transport) == 2
        assert value(bench.p, "handoff_tail_seconds_count") == 2

        async def are_told() -> bool:  # with the next report
            return value(bench.p, "step_tokens_sum") == 2 * (2 * B + 1)

        await until(are_told)
        assert value(bench.p, "worker_queue_seconds_count") == value(bench.d, "worker_queue_seconds_count") == 2


async def test_a_broken_hand_off_counts_by_its_reason_at_both_ends() -> None:
    async with Bench() as bench:
        gate = bench.p.runner.before = Gate(after=1)  # when the first chunk has been shipped
        decode = bench.decode("r", range(6 * B))
        prefill = bench.prefill("r", range(6 * B), (await anext(decode)).reserved)
        assert (await anext(prefill)).HasField("accepted")
        await until(bench.d.has_received(2))
        decode.cancel()
        gate.open()
        await failure(prefill)

        await bench.until_idle()
        for side, direction in ((bench.p, "sent"), (bench.d, "received")):
            assert value(side, "handoff_failures_total", direction=direction, reason="REQUEST_OVER") == 1
            assert value(side, "handoff_pages_total", direction=direction, transport="inline") == 0
