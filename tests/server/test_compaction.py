"""POST /v1/responses/compact: a conversation becomes the users' messages and a summary, which later input may hold."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.responses.items import checked_items, messages_of
from penstock.server.opaque import content_of, text_of
from tests.server.support import Running, script_of

SUMMARY = "A table for two — im „Nopa“ — at seven."
SAID: Any = [
    {"role": "user", "content": "A table, please."},
    {"role": "assistant", "content": "Where?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "Nopa"},
    {"role": "user", "content": "At Nopa."},
]


@pytest.fixture
def api(server: Running, text: TextPipeline) -> Iterator[openai.OpenAI]:
    before, server.runner.script = server.runner.script, script_of(text, SUMMARY)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api
    server.runner.script = before


def test_the_users_messages_and_a_summary_are_left(api: openai.OpenAI, server: Running) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": None, "strict": True}
    body: Any = {"tools": [tool]}
    compacted: Any = api.responses.compact(model="scripted", input=SAID, instructions="Be brief.", extra_body=body)
    *users, item = compacted.output
    assert (compacted.object, item.type) == ("response.compaction", "compaction")
    assert [(user.role, user.content[0].text) for user in users] == [("user", "A table, please."), ("user", "At Nopa.")]
    assert item.id.startswith("cmp_") and SUMMARY not in item.encrypted_content
    assert text_of("input[0]", item.encrypted_content) == SUMMARY
    (seen,) = server.runner.seen
    usage = compacted.usage
    assert usage.output_tokens > 0 and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (seen.sampling.temperature, seen.sampling.max_tokens) == (0, 2048 // 8)


def test_a_response_goes_on_from_it(api: openai.OpenAI, server: Running) -> None:
    first = api.responses.create(model="scripted", input=SAID)
    output: Any = api.responses.compact(model="scripted", previous_response_id=first.id).output
    given: Any = [item.model_dump(exclude_none=True) for item in output]
    further = api.responses.create(model="scripted", input=[*given, {"role": "user", "content": "Thanks."}])
    shown = [item.type for item in api.responses.input_items.list(further.id, order="asc")]
    assert shown == ["message", "message", "compaction", "message"]
    again = api.responses.compact(model="scripted", previous_response_id=further.id)
    assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]
    assert again.output[-1].id != output[-1].id


def test_what_the_model_is_shown() -> None:
    """Of what came before a summary only what users said; the next message goes on in the summary's turn."""
    item = {"type": "compaction", "encrypted_content": content_of(SUMMARY)}
    items = checked_items([*SAID, item, {"role": "user", "content": "And a bar?"}], (), {}, "x")
    head, last = messages_of(items, None)
    assert (head["role"], head["content"]) == ("user", "A table, please.")
    assert (last["role"], last["content"].startswith("At Nopa.\n\nSummary of the conversation")) == ("user", True)
    assert last["content"].endswith(f"{SUMMARY}\n\nAnd a bar?")
    alone = messages_of(checked_items([item], (), {}, "x"), "Be brief.")
    assert [message["role"] for message in alone] == ["system", "user"]


def test_a_conversation_that_has_outgrown_the_context_loses_its_oldest_turns(api: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"{number} " + "and so on " * 60} for number in range(40)]
    compacted: Any = api.responses.compact(model="scripted", input=turns)
    shown = [item.content[0].text for item in compacted.output[:-1]]
    assert 0 < len(shown) < 6
    assert shown == [turn["content"] for turn in turns[-len(shown) :]]  # the newest, in a quarter of the context
    assert compacted.usage.input_tokens < 2048


@pytest.mark.parametrize("content", ["gAAAA", "penstock1.%%%", "penstock1._w==", "penstock1.é", "penstock1.", ""])
def test_contents_of_others_are_refused(api: openai.OpenAI, content: str) -> None:
    item: Any = {"type": "compaction", "encrypted_content": content}
    with pytest.raises(openai.BadRequestError, match="cannot be read as such a content, or says nothing") as refused:
        api.responses.create(model="scripted", input=[*SAID, item])
    assert refused.value.param == "input[5].encrypted_content"
    assert base64.urlsafe_b64decode("_w==") == b"\xff"  # no text


def test_a_model_that_says_nothing(server: Running, text: TextPipeline) -> None:
    before, server.runner.script = server.runner.script, script_of(text, "")
    answer = httpx.post(f"{server.url}/v1/responses/compact", json={"input": "Hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "empty_summary")
    server.runner.script = before


def test_a_turn_that_is_longer_than_the_context_is_refused(server: Running) -> None:
    """A summary of nothing would take the conversation's place."""
    for said in ("word " * 20_000, [*SAID, {"role": "user", "content": "word " * 3_000}]):
        answer = httpx.post(f"{server.url}/v1/responses/compact", json={"input": said}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_calls_that_wait_for_their_output_stay(api: openai.OpenAI) -> None:
    waiting: Any = {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"}
    compacted: Any = api.responses.compact(model="scripted", input=[*SAID, waiting])
    assert [item.type for item in compacted.output] == ["message", "message", "compaction", "function_call"]
    given: Any = [item.model_dump(exclude_none=True) for item in compacted.output]
    output = {"type": "function_call_output", "call_id": "c2", "output": "Free at eight."}
    further = api.responses.create(model="scripted", input=[*given, output])
    assert further.status == "completed"
