"""Events of the Responses API: what deltas become, in order, and that OpenAI's own client puts them together again."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.config.errors import EngineDeadError
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.server.dialects.responses.composer import Composer, Event
from penstock.server.dialects.responses.items import checked_items, messages_of
from penstock.server.dialects.responses.schema import ResponsesBody
from penstock.server.dialects.responses.translate import ResponsesCall, prompt_request
from penstock.server.opaque import content_of, text_of

FRONTEND: Any = SimpleNamespace(piece=lambda token: f"<{token}>", token_bytes=lambda token: b"<%d>" % token)
CONTEXT: Any = SimpleNamespace(model="m", frontend=FRONTEND)
THOUGHT, TEXT, ARGUMENTS = "Let me see. It is for two.", "I look it up — a moment.", json.dumps({"city": "Zürich"})
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("find", "book")]


def composer(logprobs: int | None = None, **body: Any) -> Composer:
    asked = ResponsesBody(input="Hi", tools=TOOLS, **body)
    items = checked_items(asked.input, (), {}, "abc")
    request = prompt_request(asked, items, "abc", SamplingParams(max_tokens=99, logprobs=logprobs))
    return Composer(ResponsesCall("resp_abc", asked, tuple(items), request), CONTEXT)


def pieces(text: str, cut: random.Random) -> list[str]:
    ends = sorted(cut.sample(range(1, len(text)), min(cut.randrange(5), len(text) - 1)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def deltas(cut: random.Random, finish: FinishReason = FinishReason.STOP) -> list[Delta]:
    """Reasoning, text, and two calls, cut anywhere."""
    result = [Delta(0, reasoning=piece, token_ids=(1,), reasoning_tokens=1) for piece in pieces(THOUGHT, cut)]
    result += [Delta(0, text=piece, token_ids=(2,)) for piece in pieces(TEXT, cut)]
    for index, name in enumerate(("find", "book")):
        result.append(Delta(0, tool_calls=(ToolCallDelta(index, f"call_{index}", name),), token_ids=(3,)))
        result += [Delta(0, tool_calls=(ToolCallDelta(index, arguments=p),)) for p in pieces(ARGUMENTS, cut)]
    return [*result, Delta(0, finish_reason=finish, token_ids=(9,))]


@pytest.mark.parametrize("reasoning", [None, {"summary": "auto"}])
def test_reasoning_is_told_as_opaque_content_where_that_is_asked_for(reasoning: Any) -> None:
    for include in (None, ["reasoning.encrypted_content"]):
        made = composer(include=include, reasoning=reasoning)
        events = told(made, deltas(random.Random(3)))
        item = made.response["output"][0]
        assert item["type"] == "reasoning"
        assert ("encrypted_content" in item) is (include is not None)
        assert next(event["item"] for event in events if event["type"] == "response.output_item.done") == item
        if include:
            assert text_of("input", item["encrypted_content"]) == THOUGHT
            back = checked_items([{**item, "content": [], "summary": []}], (), {}, "x")
            assert messages_of(back, None)[0]["reasoning_content"] == THOUGHT
            assert all("encrypted_content" not in other for other in made.response["output"][1:])


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"encrypted_content": content_of("Hm, 🦜.")}, "Hm, 🦜."),
        ({"encrypted_content": content_of("Hm."), "summary": [{"type": "summary_text", "text": "In short."}]}, "Hm."),
        ({"encrypted_content": "another's", "content": [{"type": "reasoning_text", "text": "Hm."}]}, "Hm."),
        ({"encrypted_content": "another's", "summary": [{"type": "summary_text", "text": "In short."}]}, "In short."),
        ({"encrypted_content": "", "summary": [{"type": "summary_text", "text": "In short."}]}, "In short."),
        ({"encrypted_content": "penstock1.", "summary": [{"type": "summary_text", "text": "In short."}]}, "In short."),
        ({"encrypted_content": None, "summary": [{"type": "summary_text", "text": "In short."}]}, "In short."),
    ],
)
def test_what_reasoning_that_comes_back_says(item: Any, thought: str) -> None:
    items = checked_items([{"type": "reasoning", "id": "rs_1", "summary": [], **item}], (), {}, "x")
    assert messages_of(items, None)[0]["reasoning_content"] == thought


def told(made: Composer, given: list[Delta], error: Exception | None = None) -> list[Event]:
    events = [made.status("created"), made.status("in_progress")]
    for delta in given:
        events += made.take(delta)
    events += made.finish(error)
    made.count(prompt=10, cached=4)
    return [*events, made.end()]


def without_deltas(events: list[Event]) -> list[str]:
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if not (name.endswith("delta") and names[index - 1] == name)]


PART = ["content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
SUMMARY = ["{0}_part.added", "{0}_text.delta", "{0}_text.done", "{0}_part.done"]


def item(shape: list[str], name: str) -> list[str]:
    return ["output_item.added", *(line.format(name) for line in shape), "output_item.done"]


CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
AFTER_REASONING = [*item(PART, "output_text"), *CALL, *CALL, "completed"]


def test_the_official_order() -> None:
    events = told(composer(), deltas(random.Random(1)))
    expected = ["created", "in_progress", *item(PART, "reasoning_text"), *AFTER_REASONING]
    assert without_deltas(events) == expected
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)


def test_reasoning_as_a_summary_where_one_is_asked_for() -> None:
    made = composer(reasoning={"summary": "auto", "effort": "low"})
    events = told(made, deltas(random.Random(1)))
    assert without_deltas(events) == ["created", "in_progress", *item(SUMMARY, "reasoning_summary"), *AFTER_REASONING]
    reasoning = made.response["output"][0]
    assert (reasoning["summary"], reasoning["content"]) == ([{"type": "summary_text", "text": THOUGHT}], [])
    assert made.response["reasoning"] == {"effort": "low", "summary": "auto"}


@pytest.mark.parametrize("seed", range(100))
def test_openais_client_puts_the_events_together_again(seed: int) -> None:
    made = composer()
    events = told(made, deltas(random.Random(seed)))
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events[:-1]:
        state.handle_event(EVENTS.validate_python(event))
    grown = state._ResponseStreamState__current_snapshot.output  # from the events alone; the last carries everything
    assert grown[1].content[0].text == TEXT
    assert [call.arguments for call in grown[2:]] == [ARGUMENTS, ARGUMENTS]
    state.handle_event(EVENTS.validate_python(events[-1]))
    assert state._completed_response.output_text == TEXT
    reasoning, message, *calls = made.response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == TEXT
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        *(("call_0", "find", ARGUMENTS), ("call_1", "book", ARGUMENTS)),
    ]
    usage = made.response["usage"]
    thought = sum(event["type"] == "response.reasoning_text.delta" for event in events)
    assert usage["output_tokens_details"] == {"reasoning_tokens": thought}
    assert usage["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert usage["total_tokens"] == 10 + usage["output_tokens"]


def test_an_answer_that_ran_out_of_tokens() -> None:
    made = composer(max_output_tokens=4)
    given = [
        Delta(0, tool_calls=(ToolCallDelta(0, "call_0", "find", '{"ci'),)),
        Delta(0, finish_reason=FinishReason.LENGTH),
    ]
    assert told(made, given)[-1]["type"] == "response.incomplete"
    assert made.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(entry["status"], entry["arguments"]) for entry in made.response["output"]] == [("incomplete", '{"ci')]


def test_an_answer_without_a_word() -> None:
    made = composer()
    told(made, [Delta(0, finish_reason=FinishReason.STOP)])
    assert [entry["type"] for entry in made.response["output"]] == ["message"]
    assert made.response["output"][0]["content"][0]["text"] == ""


def test_a_call_without_arguments_or_id() -> None:
    made = composer()
    told(made, [Delta(0, tool_calls=(ToolCallDelta(0, None, "find"),)), Delta(0, finish_reason=FinishReason.STOP)])
    call = made.response["output"][0]
    assert call["arguments"] == "" and call["call_id"].startswith("call_")


def test_a_failure_says_nothing_of_its_cause() -> None:
    made = composer()
    events = told(made, deltas(random.Random(2))[:3], EngineDeadError("/secret/path"))
    assert events[-1]["type"] == "response.failed"
    assert "secret" not in json.dumps(events)
    assert made.response["output"][-1]["status"] == "incomplete"
    broken = composer().broken(ValueError("/secret/path"))
    assert broken.startswith(b"event: error\n") and b"secret" not in broken


def test_log_probabilities_stand_with_the_text() -> None:
    made = composer(logprobs=1, top_logprobs=1)
    entry = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.0)))
    thought = Delta(0, reasoning="Hm.", token_ids=(4,), logprobs=(entry,), reasoning_tokens=1)
    held_back, spoken = Delta(0, token_ids=(5,), logprobs=(entry,)), Delta(0, text="Hi", logprobs=(entry,))
    told(made, [thought, held_back, spoken, Delta(0, finish_reason=FinishReason.STOP)])
    found = made.response["output"][1]["content"][0]["logprobs"]
    token = {"token": "<5>", "bytes": list(b"<5>"), "logprob": -0.5}
    assert found == [{**token, "top_logprobs": [token]}] * 2
