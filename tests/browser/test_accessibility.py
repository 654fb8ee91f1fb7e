"""What axe-core, the checker inside Lighthouse, finds on every view, light and dark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from tests.browser.test_chat import opened, send
from tests.server.support import Running

if TYPE_CHECKING:
    from playwright.sync_api import Page

Scheme = Literal["light", "dark"]
CHAT = "```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n$x^2$ and [a link](https://example.com)."


def faults(page: Page) -> list[str]:
    """The rules that are broken, with the elements that break them."""
    checker = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: make browser")
    found = checker.Axe().run(page).response["violations"]
    return [f"{rule['id']} ({rule['impact']}): {[node['html'] for node in rule['nodes']][:3]}" for rule in found]


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest, page: Page) -> Scheme:
    chosen: Scheme = request.param
    page.emulate_media(color_scheme=chosen, reduced_motion="reduce")
    return chosen


def test_a_conversation(page: Page, server: Running, scheme: Scheme) -> None:
    opened(page, server)
    assert faults(page) == []
    send(page, CHAT)
    page.get_by_text("Hello! A table for two").first.wait_for()
    page.get_by_role("button", name="Send").wait_for()
    assert faults(page) == []


@pytest.mark.parametrize(("view", "heading"), [("models", "Models"), ("engine", "Engine")])
def test_views(page: Page, server: Running, scheme: Scheme, view: str, heading: str) -> None:
    opened(page, server)
    send(page, "Hello!")
    page.get_by_text("Hello! A table for two").first.wait_for()
    page.goto(f"{server.url}/#{view}")
    page.get_by_role("heading", name=heading, exact=True).wait_for()
    if view == "engine":
        page.locator(".timeline").get_by_text("scripted").wait_for()
    assert faults(page) == []


def test_the_description(page: Page, server: Running, scheme: Scheme) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_role("heading", name="Anthropic").wait_for()
    page.locator("article#post-v1-chat-completions").get_by_text("Fields", exact=True).click()
    assert faults(page) == []
