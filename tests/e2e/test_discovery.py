"""Processes behind names: workers join, drain and die under load, and the router finds out by itself."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
from certificates import SERVER_NAME, Authority
from cluster import Stub, generate, greedy, pageferry, wait_idle
from hosts import HostsFile, skip_without_mounts
from service import Service, Settings
from services import QUICK
from tiny_model import write_tiny_model

from pageferry.client import Client
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

PREFILL, DECODE = "pageferry-prefill.test", "pageferry-decode.test"
NUM_CLIENTS = 6
NUM_PROMPTS = 12
SETTLE_S = 150.0  # on a machine with much else to do


@dataclass
class Cluster:
    hosts: HostsFile
    router: Service
    services: list[Service]
    settings: dict[str, str]

    def add(self, host: str) -> Service:
        """A decode worker at another address and the same port; the name leads there once it is started."""
        port = next(service.port for service in self.services if service.role == "decode")
        worker = Service("decode", port, self.settings, name=host, host=host)
        self.services.append(worker)
        worker.start()
        self.hosts.add(DECODE, host)
        return worker


@contextlib.contextmanager
def cluster(directory: Path, of_role: Mapping[str, Settings] | None = None) -> Iterator[Cluster]:
    """A prefill worker and two decode workers, found by their names."""
    shared = QUICK | {"engine.model": str(write_tiny_model(directory / "tiny"))}
    settings = {role: shared | (of_role or {}).get(role, {}) for role in ("router", "prefill", "decode")}
    hosts = HostsFile(directory / "hosts")
    prefill = Service("prefill", 0, settings["prefill"], host="127.0.0.10")
    first = Service("decode", 0, settings["decode"], name="127.0.0.20", host="127.0.0.20")
    second = Service("decode", first.port, settings["decode"], name="127.0.0.21", host="127.0.0.21")
    names = {
        "router.prefill": f"dns:///{PREFILL}:{prefill.port}",
        "router.decode": f"dns:///{DECODE}:{first.port}",
        "router.discovery_s": "0.5",
    }
    router = Service("router", 0, settings["router"] | names)
    router.command_prefix = hosts.prefix
    made = Cluster(hosts, router, [prefill, first, second, router], settings["decode"])
    try:
        router.start()  # first: no name leads anywhere yet
        for worker in (prefill, first, second):
            hosts.add(PREFILL if worker is prefill else DECODE, worker.host)
            worker.start()
        router.wait_ready()
        yield made
    finally:
        for service in made.services:
            if service.is_alive:
                service.kill()
            service.close()


async def load(stub: Stub, expected: list[list[int]], stop: asyncio.Event, first: int) -> int:
    """Requests one after the other; how many ended well. The first that doesn't, raises."""
    number = first
    while not stop.is_set():
        answer = await generate(stub, greedy(prompt_of(number), num_tokens_of(number)))
        assert answer.token_ids == expected[number % NUM_PROMPTS]
        number += 1
    return number - first


def prompt_of(number: int) -> list[int]:
    return [4 + (number % NUM_PROMPTS * 31 + index * 7) % 290 for index in range(24 + number % NUM_PROMPTS * 5)]


def num_tokens_of(number: int) -> int:
    return 30 + number % NUM_PROMPTS * 20


Ask = Callable[[], Awaitable[pb.GetStatusResponse]]


async def until(ask: Ask, condition: Callable[[dict[str, pb.WorkerStatus]], bool]) -> float:
    """Until the router's workers, by their hosts, are as wanted; the seconds that it took."""
    began = time.monotonic()
    async with asyncio.timeout(SETTLE_S):
        while True:
            status = await ask()
            if condition({worker.address.rpartition(":")[0]: worker for worker in status.workers}):
                return time.monotonic() - began
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_decode_workers_join_drain_and_die_under_load(tmp_path: Path) -> None:
    skip_without_mounts()
    with cluster(tmp_path) as made:
        async with grpc.aio.insecure_channel(made.router.address) as channel:
            stub: Stub = InferenceServiceStub(channel)
            expected = [
                (await generate(stub, greedy(prompt_of(number), num_tokens_of(number)))).token_ids
                for number in range(NUM_PROMPTS)
            ]
            fds, ask = made.router.fds(), partial(stub.GetStatus, pb.GetStatusRequest())
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as clients:
                running = [clients.create_task(load(stub, expected, stop, index * 5)) for index in range(NUM_CLIENTS)]
                third = made.add("127.0.0.22")
                await asyncio.to_thread(third.wait_ready)
                took_s = await until(
                    ask, lambda workers: third.host in workers and workers[third.host].load.generated_tokens > 50
                )
                print(f"traffic {took_s:.1f} s after it said that it is ready")
                first, second = made.services[1:3]
                made.hosts.remove(DECODE, first.host)
                assert await asyncio.to_thread(first.terminate) == 0
                await until(ask, lambda workers: first.host not in workers)
                second.kill()
                made.hosts.remove(DECODE, second.host)
                await until(ask, lambda workers: second.host not in workers)
                fourth = made.add("127.0.0.23")
                await until(
                    ask, lambda workers: fourth.host in workers and workers[fourth.host].load.generated_tokens > 50
                )
                stop.set()
            assert all(task.result() > 0 for task in running)
            await wait_idle(stub, timeout_s=SETTLE_S)
            async with asyncio.timeout(SETTLE_S):  # one more is open while a name is looked up
                while made.router.fds() > fds + 2:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.05)
        shown = pageferry("status", "--once", "--address", made.router.address).stdout
        assert [host for host in ("127.0.0.20", "127.0.0.21", "127.0.0.22", "127.0.0.23") if f"{host}:" in shown] == [
            third.host,
            fourth.host,
        ]
        assert made.router.terminate() == 0
        assert "Traceback" not in made.router.output


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_certificates_are_for_the_name_and_not_for_the_addresses_behind_it(tmp_path: Path) -> None:
    skip_without_mounts()
    authority = Authority(tmp_path)
    of_role: dict[str, Settings] = {}
    for role, name in (("router", SERVER_NAME), ("prefill", PREFILL), ("decode", DECODE)):
        shown = authority.issue(role, server_name=name, address="10.9.8.7")
        files = {"ca": str(authority.cert), "cert": str(shown.cert), "key": str(shown.key)}
        of_role[role] = {f"security.{kind}_file": file for kind, file in files.items()}
    of_role["prefill"] = {**of_role["prefill"], "security.server_name": DECODE}  # it pushes pages to an address
    with cluster(tmp_path, of_role) as made:
        async with Client(made.router.address, server_name=SERVER_NAME, **files) as client:
            for token in (5, 6):
                result = await client.generate([token] * 40, max_tokens=8, temperature=0, ignore_eos=True).result()
                assert len(result.token_ids) == 8
                assert result.pages.shipped  # to a decode worker's own address
            await until(client.status, lambda workers: [one.state for one in workers.values()] == ["ready"] * 3)
