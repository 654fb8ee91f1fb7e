"""Custom tools, whose input is a text, in chats and responses, as OpenAI's client reads them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.config.errors import RequestError
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.custom_tools import InputReader, as_function
from penstock.text.grammar.lark_regex import as_expression
from tests.server.support import Running, Serving, script_of
from tests.text.answers import cut
from tests.text.test_lark_regex import PATCH

HELLO: Any = [{"role": "user", "content": "Hello"}]
INPUT = 'print("Ö\\n") # 😀\n\t</tool_call>'
CALL = f"Let me see.\n<tool_call>\n{json.dumps({'name': 'run', 'arguments': {'input': INPUT}})}\n</tool_call>"
CUT = '<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"a'
CHAT_TOOL: Any = {"type": "custom", "custom": {"name": "run", "description": "Runs Python."}}
TOOL: Any = {"type": "custom", "name": "run", "description": "Runs Python."}
FUNCTION: Any = {"type": "function", "name": "look", "parameters": None, "strict": False}


@pytest.fixture
def api(server: Running, text: TextPipeline) -> Iterator[openai.OpenAI]:
    before, server.runner.script = server.runner.script, script_of(text, CALL)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api
    server.runner.script = before


@pytest.mark.parametrize("ascii", [True, False])
def test_inputs_are_read_however_they_are_cut(ascii: bool) -> None:
    chances = random.Random(7)
    for text in (INPUT, "", "\\" * 9, '"', "\u2028\x7f", "日本" * 20):
        written = json.dumps({"input": text}, ensure_ascii=ascii)
        for _ in range(50):
            reader = InputReader()
            assert "".join(map(reader.push, cut(written, chances))) == text


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"input": "a\\n', "a\n"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "\\ud83d and so on"}', "\ufffd and so on"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"input": "\\ud83d\\ud83d\\ude00."}', "\ufffd\U0001f600."),
        ('{"input": "a\\ud83d\\', "a"),
        ('{"inp', ""),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_inputs_that_break_off_or_are_none(written: str, told: str) -> None:
    reader = InputReader()
    assert "".join(map(reader.push, written)) == told
    assert InputReader().push(written) == told


def test_calls_of_chats(api: openai.OpenAI) -> None:
    message = api.chat.completions.create(model="scripted", messages=HELLO, tools=[CHAT_TOOL], n=2).choices[1].message
    assert message.content == "Let me see."
    (call,) = message.tool_calls or ()
    assert call.type == "custom" and call.id.startswith("call_")
    assert (call.custom.name, call.custom.input) == ("run", INPUT)
    stream = api.chat.completions.create(model="scripted", messages=HELLO, tools=[CHAT_TOOL], stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    pieces: list[Any] = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert [(piece.type, piece.custom["name"]) for piece in pieces if piece.id] == [("custom", "run")]
    assert "".join(piece.custom["input"] for piece in pieces) == INPUT
    assert not any(piece.function for piece in pieces)
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_chat_goes_on_with_what_a_tool_gave_back(api: openai.OpenAI, server: Running) -> None:
    call: Any = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": INPUT}}
    said: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "call_1", "content": "done"})
    body = {"messages": said, "tools": [CHAT_TOOL]}
    prompt = httpx.post(f"{server.url}/apply-template", json=body).json()["prompt"]
    function = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": {"input": INPUT}}}
    same = {**body, "messages": [*HELLO, {**said[1], "tool_calls": [function]}, said[2]]}
    assert httpx.post(f"{server.url}/apply-template", json=same).json()["prompt"] == prompt
    assert "Runs Python." in prompt and "done" in prompt


def test_calls_of_responses(api: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "input": "Hello", "tools": [FUNCTION, TOOL]}
    response: Any = api.responses.create(**asked)
    message, item = response.output
    assert (message.type, item.type, item.name, item.input) == ("message", "custom_tool_call", "run", INPUT)
    assert item.id.startswith("ctc_") and item.call_id.startswith("call_")
    assert (response.tools[1].type, response.tools[1].format.type) == ("custom", "text")
    events = list(api.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    added = kinds.index("response.output_item.added", kinds.index("response.output_item.done"))
    assert (events[added].item.type, events[added].item.input) == ("custom_tool_call", "")
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert (done.input, "".join(deltas), done.item_id) == (INPUT, INPUT, events[added].item.id)
    assert events[-1].response.output[1].input == INPUT
    output: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    further = api.responses.create(**{**asked, "input": [output]}, previous_response_id=response.id)
    shown = [entry.type for entry in api.responses.input_items.list(further.id, order="asc")]
    assert shown == ["message", "message", "custom_tool_call", "custom_tool_call_output"]
    with pytest.raises(openai.BadRequestError, match="the call_id of a custom_tool_call that comes before it"):
        api.responses.create(**{**asked, "input": [output]})


def test_an_input_that_is_cut(api: openai.OpenAI, server: Running, text: TextPipeline) -> None:
    server.runner.script = script_of(text, CUT)
    size = len(text.tokenizer.encode(CUT, add_special_tokens=False))
    response: Any = api.responses.create(model="scripted", input="Hello", tools=[TOOL], max_output_tokens=size)
    (item,) = response.output
    assert (response.status, item.status, item.input) == ("incomplete", "incomplete", 'print("a')


@pytest.mark.parametrize(
    ("tool", "param", "said"),
    [
        ({"format": {"type": "grammar", "syntax": "gbnf", "definition": "start: /a/"}}, "format.syntax", "regex"),
        ({"format": {"type": "grammar", "syntax": "lark", "definition": "start: a"}}, "format.definition", "called a"),
        ({"format": {"type": "grammar", "syntax": "regex", "definition": 5}}, "format.definition", "a string"),
        ({"format": {"type": "json"}}, "format.type", '"text", "grammar"'),
        ({"name": "a b"}, "name", "letters, digits"),
    ],
)
def test_refusals(api: openai.OpenAI, server: Running, tool: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        api.responses.create(model="scripted", input="Hello", tools=[{**TOOL, **tool}])
    assert refused.value.param == f"tools[0].{param}"
    chat: Any = {"type": "custom", "custom": {**CHAT_TOOL["custom"], **tool}}
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        api.chat.completions.create(model="scripted", messages=HELLO, tools=[chat])
    assert refused.value.param == f"tools[0].custom.{param}"
    assert not server.runner.seen


@pytest.mark.parametrize(("expression", "closed"), [("a)|(b", False), (r"a\)", True), ("[)]", True), ("((", False)])
def test_expressions_stay_within_their_anchors(expression: str, closed: bool) -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": expression}
    tool = {"type": "custom", "name": "x", "format": grammar}
    if closed:
        assert as_function("tools[0]", tool)["strict"]
    else:
        with pytest.raises(RequestError, match="in pairs"):
            as_function("tools[0]", tool)


@pytest.mark.parametrize("chats", [True, False])
def test_a_custom_tool_has_its_name_for_itself(server: Running, chats: bool) -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    if chats:
        tools = [{"type": "custom", "custom": {"name": "look"}}, {"type": "function", "function": function}]
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "tools": tools}
    else:
        tools = [{"type": "function", **function}, {"type": "custom", "name": "look"}]
        path, body = "/v1/responses", {"input": "Hello", "tools": tools}
    answer = httpx.post(f"{server.url}{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[1]")


def test_an_input_is_held_to_a_lark_grammar(concierge: Serving) -> None:
    """The bundled model, which has never seen a patch, writes one."""
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
    for seed in range(2):
        asked = {**body, "seed": seed, "temperature": 0.8 * seed, "max_tokens": 200}
        answer = httpx.post(f"{concierge.url}/v1/chat/completions", json=asked, timeout=60).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["type"] == "custom" and call["custom"]["name"] == "patch"
        whole = answer["choices"][0]["finish_reason"] == "tool_calls"
        assert call["custom"]["input"].startswith("*** Begin Patch\n***")
        assert not whole or re.fullmatch(as_expression(PATCH), call["custom"]["input"])
