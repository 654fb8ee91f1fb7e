"""Models with tekken.json and no template speak Mistral's format. The texts are what mistral-common 1.13 gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import CheckpointError, TemplateError
from penstock.text.mistral import mistral_template
from penstock.text.template import ChatTemplate
from tests.text.conversations import CONVERSATIONS, TOOLS, tool_call

HI = "[INST]Hi  <there>\n é[/INST]"
LISTED = f"[AVAILABLE_TOOLS]{json.dumps(TOOLS, ensure_ascii=False)}[/AVAILABLE_TOOLS]"
SYSTEM = "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
CALLED = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln"}, "id": "call12345"}]</s>'
CALLED_11 = '[TOOL_CALLS]get_weather[CALL_ID]call12345[ARGS]{"city": "Köln"}</s>'
CALLED_13 = '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln"}</s>'
RESULT_3 = '[TOOL_RESULTS]{"content": {"t": 20}, "call_id": "call12345"}[/TOOL_RESULTS]'
RESULT_7 = '[TOOL_RESULTS]call12345[TOOL_CONTENT]{"t": 20}[/TOOL_RESULTS]'
RESULT_13 = '[TOOL_RESULTS]{"t": 20}[/TOOL_RESULTS]'
TWO_3 = (
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "A"}, "id": "call12345"}, '
    '{"name": "get_weather", "arguments": {"unit": "c"}, "id": "call67890"}]</s>'
)
ANSWERED = "20 <think>x</think> y</s>"
# (version, conversation, with tools) → text
EXPECTED: dict[tuple[str, str, bool], str] = {
    ("v3", "user", True): f"<s>{LISTED}{HI}",
    ("v3", "system", True): f"<s>{LISTED}[INST]Be brief.\n\nHi  <there>\n é[/INST]",
    ("v3", "turns", False): f"<s>{HI}Hello!</s>[INST]Be brief.\n\nHi  <there>\n é[/INST]",
    ("v3", "turns", True): f"<s>{HI}Hello!</s>{LISTED}[INST]Be brief.\n\nHi  <there>\n é[/INST]",
    ("v3", "tool", True): f"<s>{LISTED}{HI}{CALLED}{RESULT_3}",
    ("v3", "tool-text-arguments", False): f"<s>{HI}{CALLED}{RESULT_3}",
    ("v3", "tool-turns", True): (
        f"<s>{HI}{CALLED}{RESULT_3}Hello!</s>{LISTED}[INST]Be brief.\n\nHi  <there>\n é[/INST]"
    ),
    ("v3", "two-calls", False): (
        f'<s>{HI}{TWO_3}{RESULT_3}[TOOL_RESULTS]{{"content": {{}}, "call_id": "call67890"}}[/TOOL_RESULTS]'
        f"{ANSWERED}{HI}"
    ),
    ("v3", "parts", False): "<s>[INST]Hi[/INST]",
    ("v3", "answer-parts", True): f"<s>{HI}a</s>{LISTED}{HI}",
    ("v7", "turns", True): f"<s>{SYSTEM}{HI}Hello!</s>{LISTED}{HI}",
    ("v7", "tool", False): f"<s>{HI}{CALLED}{RESULT_7}",
    ("v7", "two-calls", False): (
        f"<s>{HI}{TWO_3}{RESULT_7}[TOOL_RESULTS]call67890[TOOL_CONTENT]{{}}[/TOOL_RESULTS]{ANSWERED}{HI}"
    ),
    ("v11", "system", True): f"<s>{SYSTEM}{LISTED}{HI}",
    ("v11", "tool-turns", True): f"<s>{SYSTEM}{HI}{CALLED_11}{RESULT_7}Hello!</s>{LISTED}{HI}",
    ("v13", "turns", True): f"<s>{SYSTEM}{LISTED}{HI}Hello!</s>{HI}",
    ("v13", "tool", True): f"<s>{LISTED}{HI}{CALLED_13}{RESULT_13}",
    ("v13", "reasoning", False): f"<s>{HI}[THINK]hmm[/THINK]ok</s>{HI}",
    ("v13", "two-calls", True): (
        f'<s>{LISTED}{HI}[TOOL_CALLS]get_weather[ARGS]{{"city": "A"}}[TOOL_CALLS]get_weather[ARGS]{{"unit": "c"}}</s>'
        f"{RESULT_13}[TOOL_RESULTS]{{}}[/TOOL_RESULTS]{ANSWERED}{HI}"
    ),
}


def template(folder: Path, version: str) -> ChatTemplate:
    """The format of a version."""
    (folder / "tekken.json").write_text(json.dumps({"config": {"version": version, "pattern": ""}, "vocab": []}))
    source = mistral_template(folder / "tekken.json")
    assert source is not None
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(("version", "name", "tools"), EXPECTED)
def test_conversations_are_written_in_each_version(tmp_path: Path, version: str, name: str, tools: bool) -> None:
    text = template(tmp_path, version).render(CONVERSATIONS[name], tools=TOOLS if tools else None)
    assert text == EXPECTED[version, name, tools]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL = {**tool_call({"a": 1}), "content": None}
OTHERS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("v3", [user("a"), user("b")], "<s>[INST]a\n\nb[/INST]"),
    ("v7", [{"role": "system", "content": c} for c in "st"] + [user("a")],
     "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][SYSTEM_PROMPT]t[/SYSTEM_PROMPT][INST]a[/INST]"),
    ("v3", [{"role": "system", "content": c} for c in "st"] + [user("a")], "<s>[INST]s\n\nt\n\na[/INST]"),
    ("v11", [user("a"), *({"role": "assistant", "content": c} for c in "bc"), user("d")],
     "<s>[INST]a[/INST]b\n\nc</s>[INST]d[/INST]"),
    ("v11", [user("a"), {**CALL, "content": "x"}, {"role": "tool", "tool_call_id": "call12345", "content": "text"}],
     '<s>[INST]a[/INST]x[TOOL_CALLS]get_weather[CALL_ID]call12345[ARGS]{"a": 1}</s>'
     "[TOOL_RESULTS]call12345[TOOL_CONTENT]text[/TOOL_RESULTS]"),
    ("v13", [user("a"), {**tool_call(""), "content": None}, {"role": "tool", "tool_call_id": "c", "content": ""}],
     "<s>[INST]a[/INST][TOOL_CALLS]get_weather[ARGS]{}</s>[TOOL_RESULTS][/TOOL_RESULTS]"),
    ("v3", [user("a"), CALL, {"role": "tool", "tool_call_id": "c", "content": "12"}],
     '<s>[INST]a[/INST][TOOL_CALLS][{"name": "get_weather", "arguments": {"a": 1}, "id": "call12345"}]</s>'
     '[TOOL_RESULTS]{"content": 12, "call_id": "c"}[/TOOL_RESULTS]'),
    ("v3", [user("a"), CALL, {"role": "tool", "tool_call_id": "c", "content": "so \"it\" is"}],
     '<s>[INST]a[/INST][TOOL_CALLS][{"name": "get_weather", "arguments": {"a": 1}, "id": "call12345"}]</s>'
     '[TOOL_RESULTS]{"content": "so \\"it\\" is", "call_id": "c"}[/TOOL_RESULTS]'),
]  # fmt: skip


@pytest.mark.parametrize(("version", "messages", "text"), OTHERS)
def test_other_turns(tmp_path: Path, version: str, messages: list[dict[str, Any]], text: str) -> None:
    assert template(tmp_path, version).render(messages) == text


def test_the_last_message_can_be_continued(tmp_path: Path) -> None:
    talk = [user("a"), {"role": "assistant", "content": "b "}]
    for version in ("v3", "v7", "v11", "v13"):
        chat = template(tmp_path, version)
        assert chat.render(talk, add_generation_prompt=False, continue_final_message=True) == "<s>[INST]a[/INST]b"


@pytest.mark.parametrize(
    ("version", "messages", "words"),
    [
        ("v3", [], "no message of the user"),
        ("v7", [user("a"), {"role": "nobody", "content": "x"}], "nobody"),
        ("v13", [user("a"), {"role": "assistant", "content": ""}, user("b")], "neither"),
        ("v3", [user("a"), {**CALL, "content": "x"}], "both"),
    ],
)
def test_refusals(tmp_path: Path, version: str, messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        template(tmp_path, version).render(messages)


def test_unknown_versions_have_no_format_and_damaged_files_are_clean_errors(tmp_path: Path) -> None:
    file = tmp_path / "tekken.json"
    for version in ("v99", "", "seven"):
        file.write_text(json.dumps({"config": {"version": version}}))
        assert mistral_template(file) is None
    for content in ("{", "[]", '{"config": 5}'):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=r"tekken\.json"):
            mistral_template(file)
