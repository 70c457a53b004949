"""Moments in the life of a request, and how to bring one there over real processes."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from cluster import POLL_S, Stub, busy, greedy
from pushes import hold
from services import Deployment, Service
from streams import Stream, prompt_of
from traces import wait_trace

from pageferry.v1 import inference_pb2 as pb

LONG_PROMPT = 3900  # tokens: sixty steps of a prefill worker
SILENT_S = 200.0  # of a request that waits for a silent worker, which is given up after 6 s and a little
ENDLESS = 3900  # tokens: the answer is not over before what happens to it
SOON_S = 60.0  # far below the lease of ten minutes, and far above what anything takes, also on a busy machine
MOMENTS = ("prefilling", "drawn", "decoding")


@dataclass
class Caught:
    """A request at some moment, and who serves it."""

    request: pb.GenerateRequest
    stream: Stream
    prefill: Service
    decode: Service
    gate: threading.Event  # what holds it there, beside a pause
    num_tries: int = 1  # that it took

    def service(self, role: str) -> Service:
        return self.prefill if role == "prefill" else self.decode


async def until(reached: Callable[[], bool], what: str, timeout_s: float = SOON_S) -> None:
    end = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(POLL_S / 10)


async def at_rest(stub: Stub, services: list[Service], linked: Deployment, timeout_s: float = SOON_S) -> None:
    """Until these hold nothing, whatever others do."""
    addresses = [linked.address_of(service) for service in services]
    end = time.monotonic() + timeout_s
    while True:
        left = busy(await stub.GetStatus(pb.GetStatusRequest()))
        if not (left := [line for line in left if any(address in line for address in addresses)]):
            return
        assert time.monotonic() < end, f"after {timeout_s} s: {left}"
        await asyncio.sleep(POLL_S)


async def all_told(stub: Stub) -> None:
    """Until what a service sent before now has come: the router's answers come the same way, behind it."""
    for _ in range(2):
        await stub.GetStatus(pb.GetStatusRequest())


async def catch(
    linked: Deployment, stub: Stub, moment: str, number: int, *, timeout_s: float = 100, num_tokens: int = 1200
) -> Caught:
    """A request of its own prompt, whose pages are half shipped (with its prefill worker paused), or whose first token
    is out and the rest of its pages held up, or whose tokens come, which are so many.
    """
    if moment == "prefilling":
        return await _catch_prefilling(linked, stub, number, timeout_s)
    gate = threading.Event()
    if moment == "drawn":
        linked.faults.append(hold(3, gate))
    request = greedy(prompt_of(1000 * number, 100), num_tokens if moment == "decoding" else 100)
    stream = await Stream(stub, request, timeout_s=timeout_s).until(1 if moment == "drawn" else 10)
    return await _caught(linked, stub, request, stream, gate)


async def _catch_prefilling(linked: Deployment, stub: Stub, number: int, timeout_s: float) -> Caught:
    for attempt in range(10):
        before = num_shipped(linked)
        request = greedy(prompt_of(1000 * number + attempt, LONG_PROMPT), 100)
        stream = await Stream(stub, request, timeout_s=timeout_s).started()
        caught = await _caught(linked, stub, request, stream, threading.Event())
        await until(lambda: num_shipped(linked) > before or stream.is_over, "a page is shipped")  # noqa: B023 - this turn's
        if stream.is_over:
            await stream.rest()  # raises what it failed with
        caught.prefill.pause()
        await all_told(stub)
        if not stream.num_tokens:
            caught.num_tries += attempt
            return caught
        stream.cancel()
        caught.prefill.resume()
    raise AssertionError("the prompt is computed before that can be stopped")


async def _caught(
    linked: Deployment, stub: Stub, request: pb.GenerateRequest, stream: Stream, gate: threading.Event
) -> Caught:
    prefill, decode = await servers_of(linked, stub, stream.trace_id)
    return Caught(request, stream, prefill, decode, gate)


async def servers_of(linked: Deployment, stub: Stub, trace_id: str) -> tuple[Service, Service]:
    """The workers that a request was last handed to."""
    spans = await wait_trace(stub, trace_id, Counter({("route", "INTERNAL"): 1}), timeout_s=SOON_S)
    route = [span for span in spans if span.name == "route"][-1].attributes
    services = {linked.address_of(service): service for service in linked.workers}
    return services[route["pageferry.route.prefill"]], services[route["pageferry.route.decode"]]


def silences(linked: Deployment) -> Counter[str]:
    """How often the first router has said of each worker, by its name, that it hears nothing more of it."""
    lost = [event for event in linked.routers[0].events() if event["event"] == "worker_lost"]
    missed = Counter(event["address"] for event in lost if event["reason"].startswith("no message for"))
    return Counter({worker.name: missed[linked.address_of(worker)] for worker in linked.workers})


async def until_missed(linked: Deployment, worker: Service, before: Counter[str]) -> None:
    """Until the router has noticed that the worker is silent, once more than before."""
    await until(lambda: silences(linked)[worker.name] > before[worker.name], f"{worker.name} is missed", SILENT_S)


def num_shipped(linked: Deployment) -> int:
    """Pages that prefill workers have sent so far."""
    return sum(push.num_pages for push in linked.pushes.values())
