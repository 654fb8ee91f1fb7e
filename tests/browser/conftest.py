"""A real Chromium that may reach nothing but the server under test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def text(shared_data: Path) -> TextPipeline:
    """The text side of a small chat model."""
    return TextPipeline.load(str(shared_data / "models" / "penstock-concierge"))


@pytest.fixture
def server(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own; anything that its console calls an error, and any request to another host, fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    context.set_default_timeout(20_000)
    wrong: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if of_the_page(message) else None)
    page.on("request", lambda request: wrong.append(request.url) if leaves(request.url) else None)
    yield page
    context.close()
    assert wrong == []


def of_the_page(message: Any) -> bool:
    """Whether a message of the console tells a fault of the page: refusals by the server are told there too."""
    return message.type == "error" and "Failed to load resource" not in message.text


def leaves(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))
