"""Journeys of a person who chats in a browser."""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.parsers.format import choose
from tests.server.support import ANSWER, Running, running, script_of

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.server.hosted import Hosting

TOOL = [{"name": "book", "parameters": {"type": "object", "properties": {"seats": {"type": "integer"}}}}]
CALL = '<tool_call>\n{"name": "book", "arguments": {"seats": 2}}\n</tool_call>'
MARKDOWN = (
    "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('hi')\n```\n\nMaths: $$x^2$$ and \\(y\\).\n\n"
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>[link](javascript:window.hacked=1)"
)


def opened(page: Page, server: Running | Hosting) -> None:
    page.goto(server.url)
    page.get_by_label("Message", exact=True).wait_for()
    page.get_by_role("combobox", name="Model").wait_for()


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant")


def answered(page: Page, count: int = 1) -> None:
    """Waits until that many answers are shown, and none is being written."""
    page.wait_for_function(
        "count => document.querySelectorAll('.message.assistant').length === count"
        " && !document.querySelector('.composer .primary')?.textContent.includes('Stop')",
        arg=count,
    )


def settings(page: Page) -> Locator:
    page.get_by_role("button", name="Settings").click()
    return page.get_by_label("Settings of this conversation")


def test_a_question_is_answered_as_it_is_written(page: Page, server: Running) -> None:
    server.runner.delay = 0.05
    opened(page, server)
    send(page, "A table for two, please.")
    page.get_by_text("Hello!", exact=False).first.wait_for()
    assert page.get_by_role("button", name="Stop").first.is_visible()  # more is coming
    answered(page)
    assert answers(page).locator(".markdown").inner_text() == ANSWER
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after", answers(page).inner_text())
    assert page.locator(".history li").inner_text().startswith("A table for two, please.")


def test_an_answer_can_be_stopped(page: Page, server: Running) -> None:
    server.runner.delay = 0.1
    server.runner.script = server.runner.script[:-1]  # without an end
    opened(page, server)
    send(page, "Go on for ever.")
    page.get_by_text("Hello!").first.wait_for()
    page.locator(".composer").get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    server.until_idle(10)
    send(page, "And again.")
    page.keyboard.press("Escape")
    server.until_idle(10)


def test_lines_are_broken_with_shift(page: Page, server: Running) -> None:
    opened(page, server)
    area = page.get_by_label("Message", exact=True)
    area.press_sequentially("one")
    page.keyboard.press("Shift+Enter")
    area.press_sequentially("two")
    page.keyboard.press("Enter")
    answered(page)
    assert page.locator(".message.user .plain").inner_text() == "one\ntwo"


def test_an_edited_question_is_a_branch(page: Page, server: Running) -> None:
    opened(page, server)
    send(page, "First")
    answered(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Second")
    page.locator(".editor").get_by_role("button", name="Send").click()
    page.get_by_text("2 of 2").wait_for()
    answered(page)
    assert page.locator(".message.user .plain").inner_text() == "Second"
    page.get_by_role("button", name="Former version").click()
    page.locator(".message.user .plain", has_text="First").wait_for()
    answered(page)


def test_another_answer_is_a_branch_and_the_former_one_stays(page: Page, server: Running) -> None:
    opened(page, server)
    send(page, "First")
    answered(page)
    page.get_by_role("button", name="Again").click()
    answers(page).get_by_text("2 of 2").wait_for()
    answered(page)
    answers(page).get_by_role("button", name="Former version").click()
    answers(page).get_by_text("1 of 2").wait_for()


def test_a_message_can_be_removed(page: Page, server: Running) -> None:
    opened(page, server)
    send(page, "First")
    answered(page)
    answers(page).get_by_role("button", name="Delete").click()
    answers(page).wait_for(state="detached")
    assert page.locator(".message.user").count() == 1


def test_reasoning_is_folded(page: Page, text: TextPipeline) -> None:
    with running(replace(text, answers=choose("", "hermes", "qwen3"))) as server:
        server.runner.script = script_of(text, "<think>Two seats are enough.</think>Here.")
        opened(page, server)
        send(page, "Think")
        answered(page)
        thoughts = answers(page).locator("details.reasoning")
        assert not thoughts.locator(".markdown").is_visible()
        thoughts.locator("summary").click()
        assert "Two seats" in thoughts.inner_text()
        assert answers(page).locator("> .markdown").inner_text() == "Here."


def test_tools_are_called_and_answered(page: Page, server: Running, text: TextPipeline) -> None:
    opened(page, server)
    settings(page).get_by_label("Tools").fill(json.dumps(TOOL))
    server.runner.script = script_of(text, CALL)
    send(page, "Book")
    answered(page)
    call = page.get_by_label("Call of the tool book")
    assert '"seats": 2' in call.inner_text()
    server.runner.script = script_of(text, "Done.")
    call.get_by_label("Result").fill("booked")
    call.get_by_role("button", name="Send result").click()
    answered(page, 2)
    assert page.locator(".message.tool").inner_text().startswith("Result of a tool")
    assert answers(page).last.locator(".markdown").inner_text() == "Done."


@pytest.mark.parametrize("policy", ["ask", "allow"])
def test_the_servers_tools_run_when_a_person_or_their_policy_says_so(
    page: Page, text: TextPipeline, tmp_path: Path, policy: str
) -> None:
    program = str(Path(__file__).parents[1] / "server" / "mcp_server.py")
    told = {"command": sys.executable, "args": [program], "policy": {"add": policy, "*": "deny"}}
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"local": told}}), encoding="utf-8")
    with running(text, ServerOptions(mcp_servers=str(file))) as server:
        opened(page, server)
        settings(page).get_by_role("button", name="Add the server's tools").click()
        page.wait_for_function("document.querySelector('.settings textarea.code').value.includes('local__add')")
        called = '<tool_call>\n{"name": "local__add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        server.runner.script = script_of(text, called)
        send(page, "Add")
        call = page.get_by_label("Call of the tool local__add").first
        call.wait_for()
        server.runner.script = script_of(text, "Done.")
        if policy == "ask":
            assert page.locator(".message.tool").count() == 0
            call.get_by_role("button", name="Run on the server").click()
        page.locator(".message.tool").first.wait_for()
        assert page.locator(".message.tool .plain").first.inner_text() == "5"


def test_what_is_not_json_is_told_before_it_is_sent(page: Page, server: Running) -> None:
    opened(page, server)
    tools = settings(page).get_by_label("Tools")
    tools.fill("[{")
    assert tools.get_attribute("aria-invalid") == "true"
    send(page, "Book")
    page.get_by_text("Tools cannot be read as JSON").wait_for()
    assert server.runner.seen == []


def test_sampling_and_the_system_prompt_reach_the_engine(page: Page, server: Running) -> None:
    opened(page, server)
    form = settings(page)
    form.get_by_label("System prompt").fill("Be brief.")
    form.get_by_label("Temperature").fill("0.3")
    form.get_by_label("Seed").fill("7")
    form.get_by_label("Most tokens").fill("4")
    send(page, "Hello")
    answered(page)
    sampling = server.runner.seen[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.3, 4)
    page.get_by_text("Cut at the limit of tokens.").wait_for()


def test_a_refusal_is_shown_in_words(page: Page, server: Running) -> None:
    opened(page, server)
    settings(page).get_by_label("Temperature").fill("999")
    send(page, "Hello")
    page.locator(".message .error").wait_for()
    assert "temperature" in page.locator(".message .error").inner_text()


def test_markdown_is_shown_and_nothing_foreign_runs(page: Page, server: Running, text: TextPipeline) -> None:
    server.runner.script = script_of(text, MARKDOWN)
    opened(page, server)
    send(page, "Show")
    answered(page)
    shown = answers(page).locator(".markdown")
    assert shown.locator("h1").inner_text() == "Title"
    assert shown.locator("td").all_inner_texts() == ["1", "2"]
    page.locator(".hljs-built_in, .hljs-title").first.wait_for()
    shown.locator("math").first.wait_for()
    assert shown.locator("math").count() == 2
    assert shown.locator("script, [onerror], a[href^=javascript]").count() == 0
    assert page.evaluate("window.hacked") is None


def test_conversations_stay_and_can_be_searched_and_deleted(page: Page, server: Running) -> None:
    opened(page, server)
    for said in ("apples", "pears"):
        send(page, said)
        answered(page)
        page.get_by_role("button", name="New conversation").click()
    page.reload()
    page.locator(".history li").nth(1).wait_for()
    page.get_by_label("Search conversations").fill("pear")
    assert page.locator(".history li").count() == 1
    page.get_by_role("button", name="pears", exact=True).click()
    answered(page)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete pears").click()
    page.get_by_label("Search conversations").fill("")
    page.wait_for_function("() => document.querySelectorAll('.history li').length === 1")


def test_a_conversation_deleted_while_it_is_answered_stays_away(page: Page, server: Running) -> None:
    server.runner.delay = 0.1
    server.runner.script = server.runner.script[:-1]
    opened(page, server)
    send(page, "secret")
    page.get_by_text("Hello!").first.wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete secret").click()
    server.until_idle(10)
    page.reload()
    page.get_by_label("Message", exact=True).wait_for()
    page.wait_for_timeout(500)
    assert page.locator(".history li").count() == 0


def test_a_page_left_while_an_answer_comes_keeps_what_came(page: Page, server: Running) -> None:
    server.runner.delay = 0.1
    server.runner.script = server.runner.script[:-1]
    opened(page, server)
    send(page, "Go on")
    page.wait_for_timeout(1500)  # what came is kept once a second
    page.reload()
    server.until_idle(10)
    page.get_by_role("button", name="Go on", exact=True).click()
    page.get_by_text("This answer was cut off").wait_for()
    assert answers(page).locator(".markdown").inner_text().startswith("Hello!")


def test_a_conversation_is_exported_and_brought_back(page: Page, server: Running, tmp_path: Path) -> None:
    opened(page, server)
    send(page, "Hello")
    answered(page)
    with page.expect_download() as markdown:
        page.get_by_role("button", name="Export text").click()
    assert ANSWER in Path(markdown.value.path()).read_text(encoding="utf-8")
    with page.expect_download() as exported:
        page.get_by_role("button", name="Export JSON").click()
    kept = tmp_path / "conversation.json"
    exported.value.save_as(kept)
    page.get_by_label("Import").set_input_files(kept)
    page.locator(".history li").nth(1).wait_for()
    kept.write_text("{}", encoding="utf-8")
    page.get_by_label("Import").set_input_files(kept)
    page.get_by_text("is no conversation that this page exported").wait_for()


def test_files_are_attached_and_images_only_where_they_are_taken(page: Page, server: Running) -> None:
    asked: dict[str, Any] = {}
    page.on("request", lambda request: asked.update(request.post_data_json or {}) if request.method == "POST" else None)
    opened(page, server)
    attach = page.get_by_label("Attach files")
    attach.set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"42 seats"})
    page.get_by_text("notes.txt").wait_for()
    attach.set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": png()})
    page.get_by_text("this model takes no images").wait_for()
    attach.set_input_files({"name": "data.bin", "mimeType": "application/octet-stream", "buffer": b"\0\1"})
    page.get_by_text("data.bin is not text.").wait_for()
    send(page, "What is in it?")
    answered(page)
    assert "42 seats" in asked["messages"][-1]["content"]


def png() -> bytes:
    """One grey pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\x80")) + chunk(b"IEND", b"")
    )


@pytest.fixture
def locked(text: TextPipeline) -> Iterator[Running]:
    with running(text, ServerOptions(api_keys=("secret",))) as server:
        yield server


def test_a_key_is_asked_for_and_kept(page: Page, locked: Running) -> None:
    page.goto(locked.url)
    key = page.get_by_label("This server needs an API key")
    key.fill("wrong")
    page.get_by_role("button", name="Keep").click()
    key.fill("secret")
    page.get_by_role("button", name="Keep").click()
    key.wait_for(state="detached")
    send(page, "Hello")
    answered(page)
    page.reload()
    send(page, "Hello again")
    answered(page)


def test_a_server_that_is_gone_is_told_of(page: Page, text: TextPipeline) -> None:
    with running(text) as server:
        opened(page, server)
    send(page, "Hello")
    page.get_by_text("The server does not answer.").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colours_can_be_read(page: Page, server: Running, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    opened(page, server)
    ground, colour = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert contrast(ground, colour) > 7  # WCAG 2.2, level AAA


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours (WCAG 2.2, section 1.4.3)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_a_narrow_window_hides_nothing(page: Page, server: Running) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    opened(page, server)
    send(page, "Hello")
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="New conversation").click()
    assert answers(page).count() == 0


def test_the_keyboard_reaches_everything(page: Page, server: Running) -> None:
    opened(page, server)
    page.locator("body").press("Tab")
    reached: set[str] = set()
    for _ in range(40):
        reached.add(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )
        page.keyboard.press("Tab")
    assert {
        "Skip to the content",
        "Chat",
        "Models",
        "Engine",
        "New conversation",
        "Settings",
        "Model",
        "Send",
    } <= reached


def test_what_a_screen_reader_meets(page: Page, server: Running) -> None:
    opened(page, server)
    send(page, "Hello")
    answered(page)
    for role, name in (("navigation", "Views"), ("complementary", "Conversations"), ("log", "Conversation")):
        assert page.get_by_role(role, name=name).count() == 1
    assert page.get_by_role("article", name="You").count() == 1
    assert page.get_by_role("main").count() == 1
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')].filter(one =>"
        " !one.innerText?.trim() && !one.getAttribute('aria-label') && !one.labels?.length).length"
    )
    assert unnamed == 0
    page.get_by_text("scripted has answered.").wait_for(state="attached")
