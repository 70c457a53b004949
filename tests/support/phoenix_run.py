"""Run inside a network namespace of its own: Phoenix, a deployment that exports to it, and one request.

`python phoenix_run.py VENV PICTURE` prints the request's trace id and the spans that Phoenix has of it, as JSON, and
writes a screenshot of the trace where Chromium is there.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cluster import connected, generate, greedy, running

PHOENIX = "http://127.0.0.1:6006"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
SETTINGS = {"scheduler.chunk_tokens": "128", "router.local_advantage": "1e9"}
PROMPT = " ".join(f"Ferry {number} carries {number * 3 % 17} pages over the river." for number in range(60))
PATIENCE_S = 120.0


@contextmanager
def phoenix(venv: Path) -> Iterator[None]:
    """It binds its gRPC port on all interfaces: of this namespace, where there is none but the loopback's."""
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+", encoding="utf-8") as log:
        own = {"PHOENIX_WORKING_DIR": directory, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": "6006"}
        quiet = {"PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false"}
        command = [str(venv / "bin" / "phoenix"), "serve"]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | own | quiet)
        try:
            end = time.monotonic() + PATIENCE_S
            while not _answers():
                assert process.poll() is None and time.monotonic() < end, Path(log.name).read_text(encoding="utf-8")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait()


def _answers() -> bool:
    try:
        return httpx.get(f"{PHOENIX}/healthz").is_success
    except httpx.HTTPError:
        return False


async def ask() -> str:
    """The trace id of a request that was handed over."""
    with running("--prefill", "1", "--decode", "1", "--model", "smollm2", settings=SETTINGS) as cluster:
        async with connected(cluster) as stub:
            await generate(stub, greedy("Hello", 4))  # the first one pays for what is cold
            answer = await generate(stub, greedy(PROMPT, 40))
            assert answer.started is not None
            return answer.started.trace_id


def project() -> str:
    return str(httpx.get(f"{PHOENIX}/v1/projects").raise_for_status().json()["data"][0]["id"])


def spans_of(trace_id: str) -> list[dict[str, Any]]:
    """Once no more have come for a while."""
    spans: list[dict[str, Any]] = []
    for _ in range(20):
        url = f"{PHOENIX}/v1/projects/{project()}/spans"
        reply = httpx.get(url, params={"limit": 1000, "trace_id": trace_id}).raise_for_status()
        before, spans = spans, reply.json()["data"]
        if spans and len(spans) == len(before):
            break
        time.sleep(1.0)
    return spans


def photograph(trace_id: str, push_id: str, picture: Path) -> None:
    """The trace's tree, with the push's attributes beside it."""
    from playwright.sync_api import sync_playwright  # not installed for the tests that need no browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 940})
        page.goto(f"{PHOENIX}/projects/{project()}/traces/{trace_id}?selectedSpanNodeId={push_id}")
        page.get_by_text("kv.push").first.wait_for(timeout=60_000)
        page.get_by_role("tab", name="Attributes").click(timeout=30_000)
        page.get_by_text("pageferry.handoff.hidden").first.wait_for(timeout=30_000)
        page.screenshot(path=picture)
        browser.close()


def main(venv: str, picture: str) -> None:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:4317"
    with phoenix(Path(venv)):
        trace_id = asyncio.run(ask())
        spans = spans_of(trace_id)
        if CHROMIUM.exists():
            push = next(span for span in spans if "pageferry.handoff.hidden" in span["attributes"])
            photograph(trace_id, push["id"], Path(picture))
    print(json.dumps({"trace_id": trace_id, "spans": spans}))


if __name__ == "__main__":
    main(*sys.argv[1:])
