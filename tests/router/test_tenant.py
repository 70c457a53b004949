"""Who calls: salts from credentials or proved names, in calls to workers and in the choice of them; tenants."""

import asyncio
from pathlib import Path

import fake_frontend as fake
import fake_inference
import pytest
from fake_frontend import FakeFrontend
from fake_workers import LAYOUT, Rig, Script
from gateway import client_of
from hand_clock import HandClock

from pageferry.client import Client, SyncClient
from pageferry.core.config import Config, RouterConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from pageferry.core.prefix import page_hashes
from pageferry.core.tenants import key_digest
from pageferry.router.tenant import Callers, Salts
from pageferry.router.watched_file import CHECK_S
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
    assert len({salts.of_tenant("one"), salts.of_tenant("two"), salts.of(["one"]), salts.of(ONE)}) == 4


def test_routers_with_one_key_agree_and_others_do_not() -> None:
    assert Salts("secret").of(ONE) == Salts("secret").of(ONE)
    assert len({Salts(key).of(ONE) for key in ("secret", "other", "", "")}) == 4


def test_the_key_is_not_shown() -> None:
    described = Config(router=RouterConfig(salt_key="secret")).describe()
    assert described["router.salt_key"] == "***"


async def test_http_passes_the_header_on_and_takes_no_salt_from_a_body() -> None:
    frontend = FakeFrontend()
    async with client_of(frontend) as client:
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
        async with Client(address, api_key="one") as client:
            for call in (client.tokenize("a"), client.models(), client.status(), client.trace()):
                service.metadata = {}
                await call
                assert service.metadata["authorization"] == "Bearer one"
        with SyncClient(address, api_key="one") as blocking:
            for ask in (lambda: blocking.tokenize("a"), blocking.models, blocking.status, blocking.trace):
                service.metadata = {}
                await asyncio.to_thread(ask)
                assert service.metadata["authorization"] == "Bearer one"


@pytest.mark.parametrize("authorization", [[], ONE, TWO])
@pytest.mark.field("vllm-project/vllm#16016")
async def test_a_request_goes_where_its_own_pages_are(tiny_model: Path, authorization: list[str]) -> None:
    prompt = [*range(100, 164)]
    router_config = RouterConfig(local_prefill_tokens=0, salt_key="secret")
    async with Rig(str(tiny_model), Script(range(100, 140)), num_prefill=3, router=router_config) as router:
        for worker, tenant in zip(router.prefills, ([], ONE, TWO), strict=True):
            salt = Salts("secret").of(tenant)
            stored = page_hashes(prompt, LAYOUT.page_size, salt=salt, layout_key=LAYOUT.cache_key)
            worker.hub.publish_cache(stored, [])
        await router.until(lambda: all(worker.view.num_cached_pages for worker in router.fleet.workers[:3]))
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
        request.stop.max_tokens = 3
        await router.generate(request, authorization=authorization)
        used = [worker for worker in router.prefills if worker.works]
        assert used == [router.prefills[[[], ONE, TWO].index(authorization)]]
        (route,) = [span for span in await router.log.wait(7) if span.name == "route"]
        assert route.attributes["pageferry.route.prefill_cached_tokens"] == 48


def tenants(path: Path, **keys: str) -> Path:
    path.write_text(
        "\n".join(f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{key_digest(key)}"]' for name, key in keys.items()),
        encoding="utf-8",
    )
    return path


def test_a_caller_is_who_shows_a_tenants_key(tmp_path: Path) -> None:
    callers = Callers(str(tenants(tmp_path / "tenants.toml", acme="one", other="two")), "secret", HandClock())
    acme = callers.of(["Bearer one"])
    assert acme.tenant.name == "acme"
    assert callers.of(["bearer  one "]).account is acme.account
    assert callers.of(["Bearer two"]).salt not in ("", acme.salt, Salts("secret").of(["Bearer two"]))


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        ([], "NO_API_KEY"),
        ([""], "NO_API_KEY"),
        (["Bearer"], "NO_API_KEY"),
        (["Bearer "], "NO_API_KEY"),
        (["Basic sesame"], "NO_API_KEY"),
        (["sesame"], "NO_API_KEY"),
        (["Bearer one", "Bearer one"], "NO_API_KEY"),
        (["Bearer sesame"], "UNKNOWN_API_KEY"),
        (["Bearer one two"], "UNKNOWN_API_KEY"),
        (["Bearer s\xe9same"], "UNKNOWN_API_KEY"),
        ([f"Bearer {key_digest('one')}"], "UNKNOWN_API_KEY"),
    ],
)
def test_all_others_are_refused_and_what_they_sent_is_not_repeated(
    tmp_path: Path, authorization: list[str], reason: str
) -> None:
    callers = Callers(str(tenants(tmp_path / "tenants.toml", acme="one")), "", HandClock())
    with pytest.raises(UnauthenticatedError) as caught:
        callers.of(authorization)
    assert caught.value.reason == reason
    assert "same" not in caught.value.message


def test_a_salt_is_the_tenants_whichever_key_it_shows(tmp_path: Path) -> None:
    path, clock = tmp_path / "tenants.toml", HandClock()
    callers = Callers(str(tenants(path, acme="old")), "", clock)
    salt = callers.of(["Bearer old"]).salt
    tenants(path, acme="new key")
    clock.now += CHECK_S
    assert callers.of(["Bearer new key"]).salt == salt
    with pytest.raises(UnauthenticatedError):
        callers.of(["Bearer old"])


def test_a_changed_file_is_taken_over_and_a_broken_or_lost_one_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "tenants.toml", HandClock()
    callers = Callers(str(tenants(path, acme="one")), "", clock)
    with callers.of(ONE).account.live(1, 1):
        for break_it in (lambda: path.write_text("[[tenant]]\nname = 'sesame!'"), path.unlink):
            break_it()
            caplog.clear()
            for _ in range(3):
                clock.now += CHECK_S
                assert callers.of(ONE).tenant.name == "acme"
            assert [record.message for record in caplog.records] == ["tenants_refused"]
            assert "sesame" not in caplog.text
        limited = f'[[tenant]]\nname = "acme"\nmax_requests = 1\nkey_sha256 = ["{key_digest("one")}"]'
        path.write_text(limited, encoding="utf-8")
        clock.now += CHECK_S / 2
        assert callers.of(ONE).tenant.max_requests == 0, "not looked at yet"
        clock.now += CHECK_S / 2
        with pytest.raises(ResourceExhaustedError, match="1 are live"):
            callers.of(ONE).account.check_requests()
    callers.of(ONE).account.check_requests()


@pytest.mark.parametrize("problem", ["No such file", "is no TOML", "not UTF-8"])
def test_a_wrong_file_at_the_start_is_an_error(tmp_path: Path, problem: str) -> None:
    path = tmp_path / "tenants.toml"
    if problem != "No such file":
        path.write_bytes(b"[[" if problem == "is no TOML" else b"\xff")
    with pytest.raises(InvalidArgumentError, match=problem):
        Callers(str(path), "", HandClock())
