"""A headless Chromium that records what a page says on its console and what it asks of the network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
READY = "html[data-ready]"


@dataclass
class Record:
    """What went wrong, or out, while a page was open."""

    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> Iterator[tuple[Any, Record]]:
    """A page from disk, ready to be used, with its record."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, record = context.new_page(), Record()
    page.on("console", lambda m: record.console.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: record.console.append(f"error: {e}"))
    page.on("request", lambda r: record.requests.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_selector(READY)
    yield page, record
    context.close()


def settle(page: Any) -> None:
    """Waits until the page has drawn what was just asked of it."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
