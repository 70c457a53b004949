"""What travels in headers: ids, deadlines, profiles, ignored fields; and pages of other origins."""

import asyncio
import time

import fake_frontend as fake
import pytest
from fake_frontend import FakeFrontend
from gateway import client_of, serving

from pageferry import __version__
from pageferry.core.config import ServerConfig
from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.router.gateway import protocol

BODY = {"prompt": "a"}
ORIGIN = "https://app.example.org"


@pytest.mark.parametrize("given", [None, "mine-1"])
async def test_every_answer_has_a_request_id(given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    ids = []
    for error in (None, UnavailableError("no"), RuntimeError("bug")):
        frontend = FakeFrontend(fake.HELLO if error is None else (error,))
        async with client_of(frontend, raise_bugs=False) as client:
            response = await client.post("/v1/completions", json=BODY, headers=headers)
            ids.append(response.headers["x-request-id"])
            assert frontend.requests[0].request_id == ids[-1]
            if error is None:
                assert response.json()["id"] == f"cmpl-{ids[-1]}"
            ids += [(await client.get(path, headers=headers)).headers["x-request-id"] for path in ("/health", "/none")]
    assert set(ids) == {given} if given else len(set(ids)) == len(ids)


@pytest.mark.parametrize("bad", ["x" * 121, "ä"])
async def test_an_id_that_can_t_be_taken_is_refused_and_not_repeated(bad: str) -> None:
    async with client_of(FakeFrontend()) as client:
        response = await client.post("/v1/completions", json=BODY, headers={"x-request-id": bad.encode()})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")
    assert len(response.headers["x-request-id"]) == 24


async def test_a_deadline_comes_as_a_mesh_tells_it() -> None:
    frontend = FakeFrontend()
    async with client_of(frontend) as client:
        before = time.monotonic()
        await client.post("/v1/completions", json=BODY, headers={"x-envoy-expected-rq-timeout-ms": "1500"})
        await client.post("/v1/completions", json=BODY)
        bad = await client.post("/v1/completions", json=BODY, headers={"x-envoy-expected-rq-timeout-ms": "1.5"})
    first, second = frontend.deadlines
    assert first is not None and before + 1.5 <= first <= time.monotonic() + 1.5
    assert second is None
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-envoy-expected-rq-timeout-ms")


async def test_a_profile_in_a_header_stands_for_the_field() -> None:
    frontend = FakeFrontend()
    async with client_of(frontend) as client:
        for body in (BODY, BODY | {"profile": "quality"}):
            response = await client.post("/v1/completions", json=body, headers={"x-pageferry-profile": "quality"})
            assert response.status_code == 200
        differs = await client.post(
            "/v1/completions", json=BODY | {"profile": "a"}, headers={"x-pageferry-profile": "b"}
        )
    assert [request.profile for request in frontend.requests] == ["quality", "quality"]
    assert (differs.status_code, differs.json()["error"]["param"]) == (400, "x-pageferry-profile")


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_told(stream: bool) -> None:
    body = BODY | {"user": "u", "stream": stream, "x\n☃": 1}
    async with client_of(FakeFrontend(), refuse_unknown=False) as client:
        response = await client.post("/v1/completions", json=body)
        assert response.headers["x-ignored-fields"] == "user, ?"
        many = await client.post("/v1/completions", json=BODY | {f"f{number}": 1 for number in range(1000)})
        assert many.headers["x-ignored-fields"].count(",") == 31
    async with client_of(FakeFrontend()) as client:
        response = await client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_field")
        assert "x-ignored-fields" not in (await client.post("/v1/completions", json=BODY)).headers


async def test_other_origins_pages_may_call_only_where_they_are_named() -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    asked |= {"access-control-request-headers": "authorization, content-type"}
    async with client_of(FakeFrontend()) as client:
        assert (await client.options("/v1/completions", headers=asked)).status_code == 405
        response = await client.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
        assert not [name for name in response.headers if name.startswith("access-control")]
    async with client_of(FakeFrontend((UnavailableError("no"),)), cors_origins=(ORIGIN,)) as client:
        allowed = await client.options("/v1/completions", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        failed = await client.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (503, ORIGIN)
        assert "x-request-id" in failed.headers["access-control-expose-headers"]
        other = await client.options("/v1/completions", headers=asked | {"origin": "https://other.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)


@pytest.mark.parametrize("origin", ["example.org", "https://a/b", "https://*.example.org", "null", ""])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    ServerConfig(cors_origins=("*", ORIGIN, "http://localhost:3000"))
    with pytest.raises(InvalidArgumentError, match="cors_origins"):
        ServerConfig(cors_origins=(origin,))


async def test_readiness_and_version() -> None:
    frontend = FakeFrontend()
    async with client_of(frontend) as client:
        assert (await client.get("/version")).json() == {"version": __version__}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        frontend.ready = False
        assert (await client.get("/ready")).status_code == 503


async def test_who_reads_nothing_of_an_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_S", 0.2)
    much = [fake.delta("x" * 65536) for _ in range(1000)]
    frontend = FakeFrontend((fake.started(), *much, asyncio.Event()))
    async with serving(frontend) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1)
        body = b'{"prompt":"a","stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await asyncio.wait_for(frontend.closed.wait(), 60)
        assert reader is not None
        writer.transport.abort()
        await asyncio.sleep(0)
