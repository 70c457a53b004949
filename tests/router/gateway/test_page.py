"""The page's file and headers, what it is told, and what is refused; tests/e2e/test_page.py has it in a browser."""

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_trace import TRACE_ID, example
from fake_workers import Rig, Script
from gateway import client_of

from pageferry.core.config import Config, SecurityConfig
from pageferry.core.errors import NotFoundError
from pageferry.core.tenants import key_digest
from pageferry.router.gateway import page as page_module, page_json
from pageferry.router.gateway.page import Page, page_headers
from pageferry.v1 import inference_pb2 as pb

FILE = Path(page_module.__file__).with_name("page.html")
SECRET = "a very secret question"
PATHS = ("status", "requests", "traces/x")


@asynccontextmanager
async def opened(tiny_model: Path, **options: Any) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    async with Rig(str(tiny_model), Script([4 + byte for byte in b"streamed text"]), **options) as rig:
        page = Page(rig.frontend, rig.telemetry.record, "tiny", keeps_traces=False)
        async with client_of(rig.frontend, rig.metrics.registry, page=page) as http:
            yield rig, http


async def ask(http: httpx.AsyncClient, request_id: str, **fields: Any) -> httpx.Response:
    body = {"prompt": SECRET, "max_tokens": 3} | fields
    return await http.post("/v1/completions", json=body, headers={"x-request-id": request_id})


async def get(http: httpx.AsyncClient, path: str, **headers: str) -> Any:
    response = await http.get(f"/pageferry/v1/{path}", headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    return response.json()


def test_the_file_needs_nothing_else_and_no_markup_is_made_of_data() -> None:
    text = FILE.read_text(encoding="utf-8")
    markup = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r"\s(?:on\w+|style)\s*=", markup), "attributes that the policy blocks"
    assert set(re.findall(r"\b(?:src|href)=\"?([^\s\">]*)", markup)) <= {
        "#workers",
        "#latency",
        "#past",
        "#chat",
        *re.findall(r"data:image/svg[^\s]*", markup),
    }
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}


async def test_headers_let_the_page_do_what_it_does_and_no_more(tiny_model: Path) -> None:
    async with opened(tiny_model) as (_, http):
        response = await http.get("/")
        again = await http.get("/", headers={"if-none-match": response.headers["etag"]})
        head = await http.head("/")
    assert response.status_code == head.status_code == 200
    assert response.content == FILE.read_bytes() and again.status_code == 304 and not again.content
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert {name: response.headers[name] for name in ("x-frame-options", "referrer-policy")} == {
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
    }
    assert "unsafe" not in str(response.headers)


def test_a_page_with_two_scripts_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="2 of script"):
        page_headers(b"<script>1</script><style></style><script>2</script>")


async def test_a_router_without_a_page_has_none_of_it(tiny_model: Path) -> None:
    async with opened(tiny_model) as (rig, _), client_of(rig.frontend, rig.metrics.registry) as http:
        for path in ("/", *(f"/pageferry/v1/{path}" for path in PATHS)):
            assert (await http.get(path)).status_code == 404


async def test_status_tells_of_workers_and_of_what_was_handed_over(tiny_model: Path) -> None:
    async with opened(tiny_model, num_decode=2) as (rig, http):
        before = await get(http, "status")
        assert (before["num_requests"], before["transfers"]) == (0, [])
        assert (await ask(http, "r-1")).status_code == 200
        rig.telemetry.record.close_point(0, 0)
        status = await get(http, "status")
        assert {(worker["role"], worker["address"], worker["state"]) for worker in status["workers"]} == {
            ("prefill", rig.prefill.address, "ready"),
            *(("decode", decode.address, "ready") for decode in rig.decodes),
        }
        pages = status["workers"][0]["pages"]
        assert pages["total"] == pages["free"] + pages["cached"] + pages["reserved"] + pages["resident"] > 0
        (pair,) = status["transfers"]
        assert (pair["prefill"], pair["handoffs"]) == (rig.prefill.address, 1)
        assert (status["num_requests"], status["ready"], status["model"]) == (1, True, "tiny")
        columns, (point,) = status["history"]["columns"], status["history"]["points"]
        figures = dict(zip(columns, point, strict=True))
        assert figures["ttft_p50_s"] > 0 and figures["requests_per_s"] > 0 and figures["tokens_per_s"] > 0
        newer = await get(http, f"status?after={round(figures['time'] * 1000)}")
        assert newer["history"]["points"] == []
        older = await get(http, f"status?after={round(figures['time'] * 1000) - 1}")
        assert older["history"]["points"] == [point]


async def test_requests_are_told_newest_first_without_a_word_of_their_text(tiny_model: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    async with opened(tiny_model) as (rig, http):
        assert (await ask(http, hostile)).status_code == 200
        assert (await ask(http, "bad", temperature=-1)).status_code == 400
        assert (await ask(http, "three", profile="interactive")).status_code == 200
        told = await get(http, "requests")
        assert [past["request_id"] for past in told["requests"]] == ["three", "bad", hostile]
        three, bad, first = told["requests"]
        assert (first["prefill"], first["decode"]) == (rig.prefill.address, rig.decode.address)
        assert (first["completion_tokens"], first["outcome"], first["reason"], first["tries"]) == (3, "length", "", 1)
        assert 0 < first["ttft_s"] <= first["total_s"] and len(first["trace_id"]) == 32
        assert (bad["outcome"], bad["reason"], bad["ttft_s"]) == ("invalid_argument", "INVALID_FIELD", None)
        assert (three["profile"], told["num_requests"]) == ("interactive", 3)
        newer = await get(http, f"requests?after={first['number']}&limit=1")
        assert [past["request_id"] for past in newer["requests"]] == ["three"]
        assert SECRET not in str(told) and "secret" not in str(await get(http, "status"))


async def test_what_is_over_is_written_once_however_many_look(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop, for all of what is kept, it would hold up streams."""
    written: list[object] = []
    values = page_json._values

    def counted(of: object, names: list[str]) -> list[object]:
        written.append(of)
        return values(of, names)

    monkeypatch.setattr(page_json, "_values", counted)
    async with opened(tiny_model) as (rig, http):
        for number in range(3):
            await ask(http, f"r-{number}")
        rig.telemetry.record.close_point(0, 0)
        first = [await get(http, path) for path in ("status", "requests")]
        assert len(written) == len(set(map(id, written))) == 4
        assert [await get(http, path) for path in ("status", "requests")] == first
        assert len(written) == 4


async def test_a_request_that_was_not_sampled_is_told_without_a_trace(tiny_model: Path) -> None:
    async with opened(tiny_model) as (_, http):
        body = {"prompt": "a", "max_tokens": 3}
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-{flags}"}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        told = await get(http, "requests")
        assert [past["trace_id"] for past in told["requests"]] == ["a" * 32, ""]


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("status?after=-1", "after", "after must be a whole number from 0 to 9007199254740991"),
        ("status?after=1.5", "after", "whole number"),
        ("status?after=99999999999999999999", "after", "whole number"),
        ("status?after=%D9%A1", "after", "whole number"),
        ("requests?limit=0", "limit", "limit must be a whole number from 1 to 1000"),
        ("requests?limit=1001", "limit", "from 1 to 1000"),
        ("requests?before=1", "before", "before is no parameter here; after, limit may be given"),
        ("status?limit=3", "limit", "limit is no parameter here; after may be given"),
    ],
)
async def test_what_is_asked_wrongly_is_refused_by_name(tiny_model: Path, path: str, param: str, message: str) -> None:
    async with opened(tiny_model) as (_, http):
        response = await http.get(f"/pageferry/v1/{path}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and message in error["message"]


async def test_with_tenants_only_admins_see_what_others_do(tiny_model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    text = "".join(
        f'[[tenant]]\nname = "{name}"\nadmin = {admin}\nkey_sha256 = ["{key_digest("key-of-" + name)}"]\n'
        for name, admin in (("root", "true"), ("acme", "false"))
    )
    tenants.write_text(text, encoding="utf-8")
    config = Config(security=SecurityConfig(tenants_file=str(tenants)))
    async with opened(tiny_model, config=config, admin=("Bearer key-of-root",)) as (_, http):
        assert (await http.get("/")).status_code == 200
        for path in PATHS:
            for key, *refusal in (
                ("", 401, "no_api_key"),
                ("x", 401, "unknown_api_key"),
                ("acme", 403, "no_admin"),
            ):
                headers = {"authorization": f"Bearer key-of-{key}"} if key else {}
                response = await http.get(f"/pageferry/v1/{path}?limit=bad", headers=headers)
                assert [response.status_code, response.json()["error"]["code"]] == refusal
        assert (await get(http, "requests", authorization="Bearer key-of-root"))["requests"] == []


class KeepsOne:
    """A frontend that keeps one trace."""

    ready = True

    def check_admin(self, authorization: Sequence[str], what: str) -> None:
        """Anybody may ask."""

    def get_status(self, authorization: Sequence[str]) -> pb.GetStatusResponse:
        return pb.GetStatusResponse()

    def get_trace(self, request: pb.GetTraceRequest, authorization: Sequence[str]) -> pb.GetTraceResponse:
        if request.id not in (TRACE_ID.hex(), "a/b"):
            raise NotFoundError(f"no trace {request.id!r}", reason="TRACE_NOT_FOUND")
        return pb.GetTraceResponse(trace_id=TRACE_ID.hex(), traces_data=example().SerializeToString())


async def test_a_trace_is_told_as_its_spans(tiny_model: Path) -> None:
    async with opened(tiny_model) as (rig, http):
        missing = await http.get("/pageferry/v1/traces/x")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "no_trace_store")
        page = Page(KeepsOne(), rig.telemetry.record, "tiny", keeps_traces=True)
        app = client_of(rig.frontend, rig.metrics.registry, page=page)
    async with app as http:
        by_id = await get(http, f"traces/{TRACE_ID.hex()}")
        assert by_id == await get(http, "traces/a%2Fb")
        assert (by_id["trace_id"], by_id["is_whole"]) == (TRACE_ID.hex(), True)
        assert [span["name"] for span in by_id["spans"][:3]] == ["pageferry.request", "queue", "route"]
        missing = await http.get("/pageferry/v1/traces/x")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "trace_not_found")
        assert (await http.get(f"/pageferry/v1/traces/{TRACE_ID.hex()}?raw=1")).status_code == 400
