"""Spans of work on a device name it, and have what the work took by its clock; here the device is made up."""

from typing import Any

from fake_engine import COPY_S
from handoff_bench import Bench

DEVICE = "cuda:7 Made Up"
STEP_S = 0.125


async def spans_of_a_request(*, has_device: bool) -> dict[str, list[dict[str, Any]]]:
    async with Bench() as bench:
        if has_device:
            for side in (bench.p, bench.d):
                side.pages.device_name, side.pages.copied_s, side.runner.device_s = DEVICE, 0.0, STEP_S
                side.worker.device_name = DEVICE
        await bench.generate("r", range(40))
        await bench.until_idle()
        spans: dict[str, list[dict[str, Any]]] = {}
        for span in bench.exporter.get_finished_spans():
            spans.setdefault(span.name, []).append(dict(span.attributes or {}))
        return spans


async def test_chunks_pushes_and_the_first_step_have_the_devices_own_times() -> None:
    spans = await spans_of_a_request(has_device=True)
    for chunk in spans["prefill.chunk"]:
        assert (chunk["pageferry.device"], chunk["pageferry.device_ms"]) == (DEVICE, 1000 * STEP_S)
    assert len(spans["kv.push"]) == 2
    for push in spans["kv.push"]:
        assert push["pageferry.device"] == DEVICE
        assert push["pageferry.device_ms"] == 1000 * COPY_S * push["pageferry.handoff.pages"]
    (generated,) = spans["decode.generate"]
    assert (generated["pageferry.device"], generated["pageferry.first_step_device_ms"]) == (DEVICE, 1000 * STEP_S)


async def test_of_a_processor_nothing_is_said() -> None:
    spans = await spans_of_a_request(has_device=False)
    names = {name for attributes in spans.values() for one in attributes for name in one}
    assert not [name for name in names if "device" in name]
    assert "pageferry.handoff.pages" in names
