"""Journeys through the views of models and engine, and through the API's description."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.engine.text_pipeline import TextPipeline
from penstock.library.store import open_store
from penstock.weights.open import bundled_model_path
from tests.browser.test_chat import answered, answers, opened, send
from tests.host.support import Engines, source
from tests.library.servers import Hub
from tests.library.servers import running as running_hub
from tests.server.hosted import Hosting, hosting
from tests.server.support import Running, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@pytest.fixture
def many(text: TextPipeline) -> Iterator[Hosting]:
    engines = Engines(text)
    with hosting(engines, source("small"), source("large"), memory=200) as server:
        yield server
    until(lambda: not engines.live)


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name))


def test_models_are_loaded_watched_and_unloaded(page: Page, many: Hosting) -> None:
    many.engines.gates["small"] = threading.Event()
    page.goto(f"{many.url}/#models")
    row(page, "small").get_by_role("button", name="Load", exact=True).click()
    row(page, "small").get_by_label("Loading small").wait_for()
    many.engines.gates["small"].set()
    row(page, "small").get_by_text("100 B").wait_for()
    page.get_by_text("100 B planned for models of 200 B").wait_for()
    row(page, "small").get_by_role("button", name="Unload").click()
    row(page, "small").get_by_role("button", name="Load", exact=True).wait_for()
    assert many.states()["small"] == "unloaded"


def test_two_models_answer_side_by_side(page: Page, many: Hosting) -> None:
    opened(page, many)
    page.get_by_role("button", name="Ask another model too").click()
    send(page, "Hello")
    answered(page, 2)
    assert answers(page).locator("header").all_inner_texts() == ["small", "large"]
    page.locator(".column").nth(1).get_by_label("goes on from here").check()
    page.get_by_role("button", name="Without small").click()
    send(page, "And now?")
    answered(page, 3)
    assert answers(page).last.locator("header").inner_text() == "large"


def test_a_model_is_pulled_to_its_end_and_stands_in_the_library(
    page: Page, text: TextPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_MODELS", "HF_HOME", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running_hub(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.put("me/concierge", {f.name: f.read_bytes() for f in bundled_model_path().iterdir() if f.is_file()})
        gate = hub.gates["/me/concierge/model.safetensors"] = threading.Event()
        engines, store = Engines(text), open_store()
        with hosting(engines, source("small")) as server:
            page.goto(f"{server.url}/#models")
            page.get_by_label("Pull a model").fill("me/concierge")
            page.get_by_role("button", name="Pull").click()
            page.locator(".pull progress").wait_for()
            gate.set()
            page.get_by_text("me/concierge is here.").first.wait_for()
            page.get_by_role("button", name="Pull").wait_for()
            assert "me/concierge" in [entry.name for entry in store.list()]
        until(lambda: not engines.live)


def test_a_refused_pull_is_told(page: Page, many: Hosting) -> None:
    page.goto(f"{many.url}/#models")
    page.get_by_label("Pull a model").fill("../../etc/passwd")
    page.get_by_role("button", name="Pull").click()
    page.locator(".notices .error").wait_for()
    page.get_by_role("button", name="Pull").wait_for()


def test_one_model_cannot_be_unloaded(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/#models")
    page.get_by_text("This server was started with one model.").wait_for()
    assert page.get_by_role("button", name="Unload").count() == 0


def test_the_engine_is_seen_at_work(page: Page, server: Running) -> None:
    server.runner.delay = 0.05
    server.runner.script = server.runner.script[:-1]
    opened(page, server)
    send(page, "Go on")
    page.get_by_text("Hello!").first.wait_for()
    page.get_by_role("link", name="Engine").click()
    page.wait_for_function("() => Number(document.querySelector('.figure strong')?.textContent) > 0")
    running = page.locator(".figure").filter(has_text="Requests running").locator("strong")
    page.get_by_text("running", exact=True).wait_for()
    assert running.inner_text() == "1"
    page.get_by_role("rowheader", name="forward").wait_for()
    page.get_by_text("prompt tokens came from the cache").wait_for()
    page.get_by_role("link", name="Chat").click()
    page.locator(".composer").get_by_role("button", name="Stop").click()
    server.until_idle(10)


def test_a_field_is_found_and_tried_in_the_description(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_label("Search routes and fields").fill("top_p")
    route = page.locator("article#post-v1-chat-completions")
    route.get_by_text("Fields", exact=True).click()
    field = route.get_by_role("row").filter(has=page.get_by_role("rowheader", name="top_p", exact=True))
    assert "Draw among the fewest tokens" in field.inner_text() and "≤ 1" in field.inner_text()
    route.get_by_text("Try it").click()
    route.get_by_role("button", name="Send").click()
    route.get_by_text("200, ").wait_for()
    assert "Hello! A table for two" in route.locator("pre").inner_text()
    page.get_by_label("Search routes and fields").fill("no such field")
    page.get_by_text("No route or field has that in its name.").wait_for()


def test_the_description_has_no_group_without_a_name(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_role("heading", name="Anthropic").wait_for()
    assert page.get_by_role("heading", name="Others").count() == 0
