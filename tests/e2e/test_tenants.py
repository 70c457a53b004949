"""Tenants through real processes: readiness without a key, what one can learn of another, keys that change."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, connected, generate, greedy, pageferry, running

from pageferry.cli.arguments import API_KEY_VARIABLE
from pageferry.core.tenants import key_digest
from pageferry.v1 import inference_pb2 as pb

KEYS = {"root": "key-of-root", "one": "key-of-one", "two": "key-of-two"}
PROMPT = [4 + (index * 43) % 257 for index in range(512)]


def write(path: Path, **keys: str) -> None:
    text = "\n".join(
        f'[[tenant]]\nname = "{name}"\nadmin = {str(name == "root").lower()}\nkey_sha256 = ["{key_digest(key)}"]'
        for name, key in keys.items()
    )
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    write(path, **KEYS)
    return path


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tenants_file: Path) -> Iterator[Cluster]:
    settings = {"security.tenants_file": str(tenants_file), "router.local_prefill_tokens": "0"}
    # `up` has no key here, and still finds out when all is ready.
    with running("--prefill", "1", "--decode", "1", "--model", str(tiny_model), settings=settings) as cluster:
        yield cluster


@pytest.mark.field("vllm-project/vllm#16016")
async def test_nobody_can_tell_by_counts_or_by_time_what_another_has_asked(cluster: Cluster) -> None:
    """What takes the time is computing, and shipping, what is not cached; that is counted here."""
    async with connected(cluster) as stub:

        async def num_computed() -> int:
            status = await stub.GetStatus(
                pb.GetStatusRequest(), metadata=(("authorization", f"Bearer {KEYS['root']}"),)
            )
            return sum(worker.load.prefill_tokens for worker in status.workers)

        async def ask(name: str, prompt: list[int] = PROMPT, **metadata: str) -> tuple[int, int]:
            """Tokens that were cached, and pages that were shipped; the rest is computed, as the workers will tell."""
            before = await num_computed()
            answer = await generate(stub, greedy(prompt, 2), authorization=f"Bearer {KEYS[name]}", **metadata)
            cached = answer.usage.cached_tokens
            async with asyncio.timeout(60):
                while (computed := await num_computed() - before) < len(prompt) - cached:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert computed == len(prompt) - cached
            return cached, answer.finished.pages.shipped

        whole, own = (0, 32), (511, 1)  # the last token is computed again, and its page shipped
        assert await ask("one") == whole
        first, *others = [await ask("two", **{"cache-salt": "one", "x-tenant": "one"}) for _ in range(5)]
        assert first == whole, "another's pages were found"
        assert set(others) == {own}, "its own were not"
        assert await ask("one") == own
        assert await ask("two", [10, *PROMPT[1:]]) == whole


def test_commands_take_the_key_from_the_environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ("--address", cluster.address)
    refused = pageferry("status", "--once", *address)
    assert (refused.returncode, f"set {API_KEY_VARIABLE}" in refused.stderr) == (1, True)
    monkeypatch.setitem(os.environ, API_KEY_VARIABLE, KEYS["one"])
    assert "it is no admin" in pageferry("status", "--once", *address).stderr
    assert pageferry("generate", "Hi", "--raw", "--max-tokens", "2", *address).returncode == 0
    monkeypatch.setitem(os.environ, API_KEY_VARIABLE, KEYS["root"])
    assert "decode" in pageferry("status", "--once", *address).stdout


async def test_a_key_that_is_taken_away_is_refused_within_seconds(cluster: Cluster, tenants_file: Path) -> None:
    fresh = "key-that-is-new"
    write(tenants_file, root=KEYS["root"], one=fresh, two=KEYS["two"])
    async with connected(cluster) as stub:
        end = time.monotonic() + 60
        while True:
            try:
                await generate(stub, greedy([9] * 20, 2), authorization=f"Bearer {KEYS['one']}")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                break
            assert time.monotonic() < end, "the old key still counts"
        await generate(stub, greedy([9] * 20, 2), authorization=f"Bearer {fresh}")
    assert "key-" not in cluster.output
