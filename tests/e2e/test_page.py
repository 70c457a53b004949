"""The router's page in a browser: against real processes, and against made-up ones for what these seldom do."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import fake_frontend as fake
import pytest
from browser import PICTURES, SIZES, overflow, visiting
from cluster import Cluster
from fake_frontend import FakeFrontend
from fake_trace import TRACE_ID, example, of_service, span
from gateway import serving
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

from pageferry.core.errors import NotFoundError, PermissionDeniedError, UnauthenticatedError
from pageferry.router.gateway.page import Page
from pageferry.router.record import Record
from pageferry.router.timeline import Timeline
from pageferry.v1 import inference_pb2 as pb

pytestmark = pytest.mark.slow

QUESTION = "Where do ferries go when nobody looks? " * 8  # several chunks of a prompt
NAME_OF_FOCUSED = """() => {
  const at = document.activeElement, by = at.getAttribute("aria-labelledby");
  if (at === document.body) return null;
  const label = by ? document.getElementById(by) : at.labels?.[0];
  return (at.getAttribute("aria-label") ?? (label ?? at).textContent).trim();
}"""
TOLD_OF_FIRST_TOKENS = """(last) => {
  const others = Object.fromEntries(CHARTS.flatMap((chart) => chart.lines.map(([field]) => [field, 0])));
  const point = (time, ttft) => ({ ...others, time, ttft_p50_s: ttft, ttft_p99_s: ttft });
  now.points = [point(1e9, 0.25), point(1e9 + 60, last)];
  showCharts();
  return document.querySelector(".chart .now").textContent;
}"""
ENDS_OF_NAMES = """all => all.map(one => {
  return [one.getBoundingClientRect().right, one.parentNode.getBoundingClientRect().toJSON()];
})"""
HOSTILE = '"><img src=x onerror="window.hurt=1"><script>window.hurt=1</script>{{7*7}}'


async def text_of(page: Any, selector: str) -> str:
    return str(await page.inner_text(selector))


async def test_chat_then_trace_then_waterfall(split: Cluster) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    async with visiting(split.http) as page:
        await page.wait_for_selector(".node.decode")
        assert await page.locator(".node.prefill").count() == 1 and await page.locator(".node.decode").count() == 2
        assert await text_of(page, "#readiness") == "ready"
        await page.click("#ask summary")
        await page.fill("#most", "24")
        await page.fill("#question", QUESTION)
        await page.press("#question", "Enter")
        link = await page.wait_for_selector("[data-trace]")
        assert "first token" in await text_of(page, "[data-fact=ttft]")
        trace_id = await link.get_attribute("data-trace")
        await page.wait_for_function("id => now.requests[0]?.trace_id === id", arg=trace_id)
        await link.click()
        await page.wait_for_selector('.fall[data-span="kv.push"]')
        await page.wait_for_function("() => traceData?.is_whole")
        await check_waterfall(page, trace_id)
        await page.keyboard.press("Escape")
        await page.wait_for_function("() => !document.querySelector('#trace').open && !location.hash")
        assert await page.evaluate("document.activeElement.dataset.trace") == trace_id
        await page.focus("#requests tr:first-child button")
        await page.keyboard.press("Enter")
        await page.wait_for_selector('.fall[data-span="kv.push"]')
        assert trace_id in await text_of(page, "#trace-title")
        await take_pictures(page)


async def check_waterfall(page: Any, trace_id: str) -> None:
    """The prompt's chunks stand right above the push, and a part of it is behind their compute."""
    await page.click("text=Hand-off")
    names = await page.eval_on_selector_all(".fall[data-span]", "rows => rows.map(row => row.dataset.span)")
    assert names[0] == "pageferry.request"
    push = names.index("kv.push")
    assert names[push - 1] == "prefill.chunk" and names[push + 1] == "kv.push"
    rows = page.locator(".fall[data-span]")
    chunks = [await bar.bounding_box() for bar in await rows.nth(push - 1).locator(".lane i").all()]
    hidden = await rows.nth(push).locator(".lane i.hidden").bounding_box()
    assert len(chunks) > 1
    assert chunks[0]["y"] < hidden["y"]
    assert hidden["x"] < chunks[-1]["x"] + chunks[-1]["width"]
    assert hidden["x"] + hidden["width"] <= chunks[-1]["x"] + chunks[-1]["width"] + 2
    await rows.nth(push).click()
    told = await text_of(page, ".attributes")
    assert "pageferry.handoff.pages" in told and "pageferry.handoff.hidden" in told
    assert not re.search(r"\.\d{9}", told)
    assert trace_id in await text_of(page, "#trace-title")


async def take_pictures(page: Any) -> None:
    for name, size in SIZES.items():
        await page.set_viewport_size(size)
        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            await page.screenshot(path=PICTURES / f"trace-{name}-{theme}.png")
    await page.keyboard.press("Escape")
    for name, size in SIZES.items():
        await page.set_viewport_size(size)
        assert await overflow(page) <= 0
        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            await page.screenshot(path=PICTURES / f"page-{name}-{theme}.png", full_page=True)


class Shown(FakeFrontend):
    """A frontend whose workers, traces and refusals are made up."""

    def __init__(self, script: fake.Script = fake.HELLO, model: str = "tiny") -> None:
        super().__init__(script)
        self.model = model
        self.record = Record()
        self.keys: dict[str, bool] = {}  # of callers, with whether they are admins; none: anybody may call
        worker = pb.WorkerStatus(role="decode", address="10.0.0.1:7000", state="down", reason="it does not answer")
        worker.load.pages_total, worker.load.pages_free = 64, 60
        self.workers = [worker]
        self.trace = example()

    def check_caller(self, authorization: Sequence[str]) -> None:
        if self.keys and "".join(authorization).removeprefix("Bearer ") not in self.keys:
            raise UnauthenticatedError("the API key is not known", reason="UNKNOWN_API_KEY")

    def check_admin(self, authorization: Sequence[str], what: str) -> None:
        self.check_caller(authorization)
        if self.keys and not self.keys["".join(authorization).removeprefix("Bearer ")]:
            raise PermissionDeniedError(f"tenant acme may not ask for {what}: it is no admin", reason="NO_ADMIN")

    def get_status(self, authorization: Sequence[str]) -> pb.GetStatusResponse:
        self.check_admin(authorization, "the status")
        return pb.GetStatusResponse(workers=self.workers, profiles=[pb.ProfileStatus(name=self.model)])

    def get_trace(self, request: pb.GetTraceRequest, authorization: Sequence[str]) -> pb.GetTraceResponse:
        self.check_admin(authorization, "traces")
        if request.id not in (TRACE_ID.hex(), fake.TRACE_ID):
            raise NotFoundError(f"no trace {request.id!r} is kept", reason="TRACE_NOT_FOUND")
        return pb.GetTraceResponse(trace_id=TRACE_ID.hex(), traces_data=self.trace.SerializeToString())

    def ended(self, request_id: str, reason: str = "", trace_id: str = TRACE_ID.hex()) -> None:
        outcome = "internal" if reason else "stop"
        self.record.ended(Timeline(0.0, request_id=request_id), self.model, trace_id, outcome, reason, 1.0)


@asynccontextmanager
async def shown(frontend: Shown, trace_url: str = "") -> AsyncIterator[str]:
    """With `trace_url`, traces are kept there and not here."""
    page = Page(frontend, frontend.record, frontend.model, keeps_traces=not trace_url, trace_url=trace_url)
    async with serving(frontend, page=page) as url:
        yield url


async def test_a_stranger_s_spans_are_rows_once_each_as_text() -> None:
    """One id for two spans, of which one is below the other; a long chain; times that make no sense."""
    frontend = Shown()
    twice = [span((1, 2), "dup", "", (0, 1)), span((2, 1), "between", "", (1, 2)), span((1, 0), HOSTILE, "", (9, 3))]
    chain = [span((number, number - 1 if number > 10 else 0), "deep", "", (0, 1)) for number in range(10, 910)]
    chain[0].attributes.add(key=HOSTILE).value.string_value = HOSTILE
    frontend.trace.CopyFrom(TracesData(resource_spans=[of_service(HOSTILE, *twice), of_service("x", *chain)]))
    async with shown(frontend) as url, visiting(f"{url}/#trace={TRACE_ID.hex()}") as page:
        await page.wait_for_selector('.fall[data-span="deep"]')
        names = await page.eval_on_selector_all(".fall[data-span]", "rows => rows.map(row => row.dataset.span)")
        assert (names.count("deep"), names.count("dup"), names.count("between"), names.count(HOSTILE)) == (
            900,
            1,
            1,
            1,
        )
        await page.locator('.fall[data-span="deep"]').first.click()
        assert HOSTILE in await text_of(page, ".attributes")
        assert await page.evaluate("window.hurt") is None


async def test_a_row_that_is_open_stays_open_when_more_spans_come() -> None:
    frontend = Shown()
    late = frontend.trace.resource_spans.pop(0)
    async with shown(frontend) as url, visiting("about:blank") as page:
        await page.clock.install(time=0)
        await page.clock.pause_at(1)  # so that spans are asked for when the test says
        await page.goto(f"{url}/#trace={TRACE_ID.hex()}")
        await page.click('.fall[data-span="kv.push"]')
        frontend.trace.resource_spans.append(late)
        await page.clock.run_for(400)
        await page.wait_for_selector('.fall[data-span="decode.generate"]')
        assert await page.locator(".attributes").count() == 1
        assert "pageferry.handoff.hidden" in await text_of(page, ".attributes")
        await page.click('.fall[data-span="kv.push"]')
        await page.click("text=Hand-off")
        assert await page.locator(".attributes").count() == 0


async def test_whatever_names_are_given_they_are_shown_as_text() -> None:
    frontend = Shown((fake.started(), fake.delta(HOSTILE), fake.finished()), model=HOSTILE)
    frontend.workers[0].address = frontend.workers[0].reason = HOSTILE
    frontend.ended(HOSTILE, reason=HOSTILE)
    async with shown(frontend) as url, visiting(url, expected="status of 404") as page:
        await page.wait_for_selector("#requests tr")
        await page.fill("#question", HOSTILE)
        await page.press("#question", "Enter")
        await page.wait_for_selector("[data-trace]")
        for place in ("#model", "#requests", ".node.decode", ".node .reason", ".said.user", ".said.assistant"):
            assert HOSTILE in await text_of(page, place), place
        await page.click("#requests button")
        await page.wait_for_selector(".fall[data-span]")
        await page.goto(f"{url}/#trace=%3Cimg%20src=x%20onerror=window.hurt=1%3E")
        assert await page.evaluate("[window.hurt, document.querySelectorAll('img, main script').length]") == [None, 0]


@pytest.mark.parametrize("size", SIZES)
async def test_many_workers_are_told_apart_and_those_in_trouble_stand_first(size: str) -> None:
    frontend = Shown()
    frontend.workers = [
        pb.WorkerStatus(role=role, address=f"pageferry-{role}-{number}.pageferry.svc.cluster.local:7000", state="ready")
        for role, num_workers in (("prefill", 16), ("decode", 34))
        for number in range(num_workers)
    ]
    down = frontend.workers[-1]
    down.state, down.reason, down.load.running = "down", "it does not answer", 7
    async with shown(frontend) as url, visiting(url, size=size) as page:
        first = page.locator(".node.decode").first
        assert (await first.inner_text()).split() == ["pageferry-decode-33", "down", "it", "does", "not", "answer"]
        names = page.locator(".node.prefill b bdi, .node.decode b bdi")
        assert len(set(await names.all_inner_texts())) == 50
        for end, frame in await names.evaluate_all(ENDS_OF_NAMES):
            assert end <= frame["right"] + 1 and frame["width"] > 60, "what tells a name from others is cut off"
        assert await overflow(page) <= 0


async def test_a_trace_tells_tries_that_failed_from_what_was_handed_over_and_steps_are_one_row() -> None:
    frontend = Shown()
    pages = {"pageferry__handoff__pages": 2, "pageferry__handoff__bytes": 2000, "pageferry__handoff__format": "int8"}
    spans = [
        span((1, 0), "pageferry.request", "server", (0, 90), pageferry__resumed_at=0, pageferry__ttft__delivery_ms=9)
    ]
    spans += [
        span((number, 1), "kv.push", "client", (number, 40), **pages if number > 2 else {}) for number in (2, 3, 4)
    ]
    spans[1].status.code = Status.STATUS_CODE_ERROR
    spans += [span((number, 0), "decode.step", "", (number, number + 1)) for number in range(50, 80)]
    frontend.trace.CopyFrom(TracesData(resource_spans=[of_service("pageferry-decode", *spans)]))
    async with shown(frontend) as url, visiting(f"{url}/#trace={TRACE_ID.hex()}") as page:
        await page.wait_for_selector(".falls")
        rows = await page.locator(".fall[data-span]").all_inner_texts()
        assert [" ".join(row.split()[1:3]) for row in rows] == [
            "pageferry.request 90",
            "kv.push failed",
            "kv.push 37",
            "kv.push 36",
            "decode.step ×",
        ]
        assert "× 30" in rows[-1] and await page.locator('[data-span="decode.step"] .lane i').count() == 30
        told = await text_of(page, "#trace-body")
        assert "4 pages, 4.0 kB, int8" in told and "delivery, and tries that failed 9.0 ms" in told


async def test_a_failure_of_the_script_and_of_the_router_is_shown() -> None:
    frontend = Shown()
    expected = "planted|ERR_CONNECTION_REFUSED"
    async with visiting("about:blank", expected=expected) as page:
        async with shown(frontend) as url:
            await page.goto(url)
            await page.wait_for_selector(".node.decode")
            await page.evaluate("setTimeout(() => { throw new Error('planted') })")
            await page.wait_for_selector("text=Error in this page: Uncaught Error: planted")
            await page.click("#problems button")
            assert await text_of(page, "#problems") == ""
        await page.wait_for_selector("text=The router can't be asked")
        assert await text_of(page, "#readiness") == "not reached"
        assert float(await page.evaluate("getComputedStyle(document.querySelector('.view')).opacity")) < 1


async def test_a_key_is_asked_for_and_kept_for_the_tab_only() -> None:
    frontend = Shown()
    frontend.keys = {"root": True, "acme": False}
    async with shown(frontend) as url, visiting(url, expected="status of 40[13]") as page:
        for key, told in (("wrong", "the API key is not known"), ("acme", "The chat works with this key")):
            await page.fill("#key", key)
            await page.keyboard.press("Enter")
            await page.wait_for_selector(f"text={told}")
        await page.fill("#question", "hi")
        await page.press("#question", "Enter")
        await page.wait_for_selector("text=Hello")
        await page.wait_for_selector("[data-fact=ttft]")
        assert not await page.is_visible("#workers") and await page.locator("[data-trace]").count() == 0
        await page.click("#key-button")
        await page.fill("#key", "root")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".node.decode")
        assert await text_of(page, "#problems") == ""
        await page.reload()
        await page.wait_for_selector(".node.decode")
        stored = "[Object.values(localStorage), document.cookie, Object.values(sessionStorage)]"
        assert await page.evaluate(stored) == [[], "", ["root"]]
        assert frontend.authorizations == [["Bearer acme"]]


async def test_a_figure_that_is_not_of_now_says_of_when_it_is() -> None:
    async with shown(Shown()) as url, visiting(url) as page:
        await page.wait_for_selector(".node.decode")
        for last, is_old in ((0.25, False), (None, True)):
            told = await page.evaluate(TOLD_OF_FIRST_TOKENS, last)
            assert "250 ms" in told and ("at " in told) == is_old, told


async def test_nothing_is_asked_while_nobody_looks() -> None:
    async with shown(Shown()) as url, visiting("about:blank") as page:
        await page.clock.install()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/v1/status" in request.url else None)
        await page.goto(url)
        await page.wait_for_selector(".node.decode")

        async def looked_at(is_hidden: bool) -> None:
            script = "value => Object.defineProperty(document, 'hidden', {value, configurable: true})"
            await page.evaluate(script, is_hidden)
            await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

        await looked_at(True)
        before = len(asked)
        await page.clock.run_for(60_000)
        await page.evaluate("fetch('/version').then(() => 0)")  # whatever was begun has been seen by now
        assert len(asked) == before
        async with page.expect_request(f"{url}/pageferry/v1/status*"):
            await looked_at(False)
        async with page.expect_response(f"{url}/pageferry/v1/status*"):
            await page.clock.run_for(2500)


@pytest.mark.parametrize("scheme", ["https", "javascript"])
async def test_a_trace_that_is_elsewhere_is_linked_to(scheme: str) -> None:
    frontend = Shown()
    frontend.ended("r-1", trace_id="a" * 32)
    trace_url = f"{scheme}://traces.example/{{trace_id}}?from=page"
    async with shown(frontend, trace_url) as url, visiting(url, expected="status of 404") as page:
        await page.click("#requests button")
        await page.wait_for_selector("text=is kept")
        links = await page.eval_on_selector_all("#trace-body a", "links => links.map(link => link.href)")
        assert links == ([f"https://traces.example/{'a' * 32}?from=page"] if scheme == "https" else [])


@pytest.mark.parametrize("way", ["button", "key"])
async def test_an_answer_can_be_stopped(way: str) -> None:
    frontend = Shown((fake.started(), fake.delta("Hel", fake.token(0, 10)), asyncio.Event()))
    async with shown(frontend) as url, visiting(url) as page:
        await page.fill("#question", "hi")
        await page.click("#send")
        await page.wait_for_selector("text=Hel")
        await (page.click("#stop") if way == "button" else page.press("#question", "Escape"))
        await page.wait_for_selector("text=stopped")
        async with asyncio.timeout(60):
            await frontend.closed.wait()
        assert await page.is_visible("#send") and not await page.is_visible("#stop")


async def test_all_that_can_be_used_can_be_reached_by_keys_and_has_a_name() -> None:
    frontend = Shown()
    frontend.ended("r-1")
    frontend.ended("not-sampled", trace_id="")
    async with shown(frontend) as url, visiting(url, size="phone") as page:
        await page.wait_for_selector("#requests tr")
        reached = []
        for _ in range(40):
            await page.keyboard.press("Tab")
            name = await page.evaluate(NAME_OF_FOCUSED)
            if name is None:
                break
            reached.append(name)
            assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", name
        wanted = [
            "Workers",
            "Chat",
            "Switch between light and dark",
            "Show the trace of request r-1",
            "Message",
            "Send",
        ]
        assert [name for name in reached if name in wanted] == wanted, reached
        assert all(reached), reached
        assert await overflow(page) <= 0


async def test_the_theme_is_what_was_chosen() -> None:
    async with shown(Shown()) as url, visiting(url) as page:
        await page.emulate_media(color_scheme="light")
        await page.click("#theme")
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.reload()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == dark == "rgb(15, 20, 24)"
