"""Headless Chromium, for tests of the router's page."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import programs

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
PICTURES = Path(__file__).parents[2] / "build" / "page"
PATIENCE_MS = 100_000  # also to start; a busy machine needs many seconds


@asynccontextmanager
async def visiting(url: str, *, size: str = "desktop", expected: str = r"(?!)") -> AsyncIterator[Any]:
    """The page at a URL, as playwright has it; leaving it fails where its console told of an error.

    `expected` is a pattern of errors that the test is about.
    """
    chromium = programs.find("chromium")
    programs.find("playwright")
    from playwright.async_api import async_playwright

    errors: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE_MS)
        page = await browser.new_page(viewport=SIZES[size])  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        try:
            await page.goto(url)
            yield page
        finally:
            await browser.close()
    assert [error for error in errors if not re.search(expected, error)] == []


async def overflow(page: Any) -> int:
    """Pixels by which the page is wider than its window."""
    return int(await page.evaluate("document.documentElement.scrollWidth - innerWidth"))
