"""Whom a request shares cached pages with: salts from credentials, in calls to workers and in the choice of them."""

from pathlib import Path

import fake_frontend as fake
import fake_inference
import httpx
import pytest
from fake_frontend import FakeFrontend
from fake_workers import LAYOUT, Rig, Script
from prometheus_client import CollectorRegistry

from pageferry.client import Client, SyncClient
from pageferry.core.config import Config, RouterConfig
from pageferry.core.prefix import page_hashes
from pageferry.router.http import build_app
from pageferry.router.tenant import Salts
from pageferry.v1 import inference_pb2 as pb

ONE, TWO = ["Bearer one"], ["Bearer two"]


def test_salts_are_the_callers_own_and_tell_nothing() -> None:
    salts = Salts("")
    assert salts.of([]) == salts.of([""]) == ""
    assert salts.of(ONE) == salts.of(ONE)
    assert len({"", salts.of(ONE), salts.of(TWO), salts.of([*ONE, *TWO]), salts.of(["Bearer oneBearer two"])}) == 5
    assert len(salts.of(ONE)) == 32
    # Another's salt is no credential for it.
    assert salts.of([salts.of(ONE)]) != salts.of(ONE)


def test_routers_with_one_key_agree_and_others_do_not() -> None:
    assert Salts("secret").of(ONE) == Salts("secret").of(ONE)
    assert len({Salts(key).of(ONE) for key in ("secret", "other", "", "")}) == 4


def test_the_key_is_not_shown() -> None:
    described = Config(router=RouterConfig(salt_key="secret")).describe()
    assert described["router.salt_key"] == "***"


async def test_http_passes_the_header_on_and_takes_no_salt_from_a_body() -> None:
    frontend = FakeFrontend()
    transport = httpx.ASGITransport(build_app(frontend, CollectorRegistry()))
    async with httpx.AsyncClient(transport=transport, base_url="http://pageferry") as client:
        for headers in ({}, {"authorization": "Bearer one"}):
            await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        refused = await client.post("/v1/completions", json={"prompt": "a", "cache_salt": "one"})
    assert frontend.authorizations == [[], ["Bearer one"]]
    assert refused.status_code == 400


async def test_clients_send_their_key() -> None:
    async with fake_inference.serving(*fake.HELLO) as (address, service):
        async with Client(address, api_key="one") as client:
            await client.generate("a").result()
        assert service.metadata["authorization"] == "Bearer one"
        async with Client(address) as client:
            await client.generate("a").result()
        assert "authorization" not in service.metadata
    assert SyncClient(api_key="one")._metadata == (("authorization", "Bearer one"),)


@pytest.mark.parametrize("authorization", [[], ONE, TWO])
async def test_a_request_goes_where_its_own_pages_are(tiny_model: Path, authorization: list[str]) -> None:
    prompt = [*range(100, 164)]
    router_config = RouterConfig(local_prefill_tokens=0, salt_key="secret")
    async with Rig(str(tiny_model), Script(range(100, 140)), num_prefill=3, router=router_config) as router:
        for worker, tenant in zip(router.prefills, ([], ONE, TWO), strict=True):
            salt = Salts("secret").of(tenant)
            stored = page_hashes(prompt, LAYOUT.page_size, salt=salt, layout_key=LAYOUT.cache_key())
            worker.hub.publish_cache(stored, [])
        await router.until(lambda: all(worker.view.num_cached_pages for worker in router.fleet.workers[:3]))
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
        request.stop.max_tokens = 3
        await router.generate(request, authorization=authorization)
        used = [worker for worker in router.prefills if worker.works]
        assert used == [router.prefills[[[], ONE, TWO].index(authorization)]]
        (route,) = [span for span in await router.log.wait(7) if span.name == "route"]
        assert route.attributes["pageferry.route.prefill_cached_tokens"] == 48
