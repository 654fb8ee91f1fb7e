"""What vLLM's clients read of answers, streams, ids and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": HELLO}
TEXT: dict[str, Any] = {"prompt": "Good morning"}


@pytest.fixture
def sent(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


@pytest.fixture
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def chunks(sent: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    lines = sent.post(path, json={**body, "stream": True}, headers=headers).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_what_was_not_asked_for_is_null(api: openai.OpenAI) -> None:
    chat: Any = api.chat.completions.create(model="scripted", messages=HELLO)  # type: ignore[arg-type]
    assert (chat.prompt_logprobs, chat.prompt_token_ids, chat.choices[0].token_ids) == (None, None, None)
    text: Any = api.completions.create(model="scripted", prompt="Hello").choices[0]
    assert (text.prompt_logprobs, text.prompt_token_ids, text.token_ids) == (None, None, None)


def test_nothing_is_counted_before_it_is_generated(sent: httpx.Client, server: Running) -> None:
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    told = chunks(sent, "/v1/chat/completions", {**CHAT, **usage})
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts[:2] == [0, 1]
    assert counts == sorted(counts) and counts[-1] == len(server.runner.script)
    assert [chunk["usage"]["prompt_tokens"] > 0 for chunk in told] == [True] * len(told)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
def test_usage_in_every_chunk_needs_usage(
    sent: httpx.Client, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    told = chunks(sent, path, {**body, "stream_options": {**options, "continuous_usage_stats": True}})
    assert all(chunk["choices"] and "usage" not in chunk for chunk in told)


def test_a_streamed_chat_tells_its_prompt_in_the_first_chunk(sent: httpx.Client, server: Running) -> None:
    told = chunks(sent, "/v1/chat/completions", {**CHAT, "return_token_ids": True})
    assert told[0]["prompt_token_ids"] == list(server.runner.seen[0].prompt_ids)
    assert not any("prompt_token_ids" in chunk for chunk in told[1:])
    assert not any("prompt_token_ids" in choice for chunk in told for choice in chunk["choices"])
    ids = [token for chunk in told[1:] for choice in chunk["choices"] for token in choice["token_ids"]]
    assert ids == list(server.runner.script)
    texts = chunks(sent, "/v1/completions", {**TEXT, "return_token_ids": True})
    assert texts[0]["choices"][0]["prompt_token_ids"] == list(server.runner.seen[1].prompt_ids)


def test_the_token_that_was_taken_comes_first(api: openai.OpenAI, text: TextPipeline, server: Running) -> None:
    """Even where it is not the likeliest; and once."""
    server.runner.likelier = 2
    logprobs: Any = api.completions.create(model="scripted", prompt="Hello", logprobs=3, max_tokens=3).choices[0]
    for token, top in zip(logprobs.logprobs.tokens, logprobs.logprobs.top_logprobs, strict=True):
        assert next(iter(top)) == token
        assert len(top) == 3
    assert logprobs.logprobs.tokens[0] == text.tokenizer.decode([server.runner.script[0]])


@pytest.mark.parametrize(
    ("path", "body", "prefix"), [("/v1/chat/completions", CHAT, "chatcmpl"), ("/v1/completions", TEXT, "cmpl")]
)
def test_the_clients_id_is_the_objects(sent: httpx.Client, path: str, body: dict[str, Any], prefix: str) -> None:
    named = sent.post(path, json={**body, "request_id": "from-body"}, headers={"X-Request-Id": "from-header"})
    assert named.json()["id"] == f"{prefix}-from-header"
    assert named.headers["x-request-id"] == "from-header"
    assert sent.post(path, json={**body, "request_id": "from-body"}).json()["id"] == f"{prefix}-from-body"
    assert {chunk["id"] for chunk in chunks(sent, path, body, **{"X-Request-Id": "a.b:c"})} == {f"{prefix}-a.b:c"}
    unusable = sent.post(path, json=body, headers={"X-Request-Id": "a b"}).json()["id"]
    assert unusable.startswith(f"{prefix}-") and " " not in unusable
    rendered = sent.post(f"{path}/render", json=body, headers={"X-Request-Id": "mine"}).json()
    if prefix == "chatcmpl":
        assert rendered["request_id"] == "chatcmpl-mine"
    else:
        assert [item["request_id"] for item in rendered] == ["cmpl-mine-0"]
        several = sent.post(f"{path}/render", json={"prompt": ["a", "b"]}, headers={"X-Request-Id": "mine"}).json()
        assert [item["request_id"] for item in several] == ["cmpl-mine-0", "cmpl-mine-1"]


def test_two_requests_may_have_one_id(sent: httpx.Client) -> None:
    """It names the answer for its client, and nothing in the server."""
    for _ in range(2):
        assert sent.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "same"}).json()["id"] == "cmpl-same"


def test_rendered_requests_keep_their_stream_options(sent: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": None}
    streamed = {**CHAT, "stream": True, "stream_options": options}
    assert sent.post("/v1/chat/completions/render", json=streamed).json()["stream_options"] == options
    assert sent.post("/v1/chat/completions/render", json=CHAT).json()["stream_options"] is None


def test_tokens_as_the_vocabulary_writes_them(sent: httpx.Client, text: TextPipeline) -> None:
    found = sent.post("/tokenize", json={"prompt": "It is \x80\x81 ü", "return_token_strs": True}).json()
    assert found["token_strs"] == [text.tokenizer.piece(token) for token in found["tokens"]]
    assert "Ġis" in found["token_strs"]
    assert not any("�" in piece for piece in found["token_strs"])
    assert sent.post("/tokenize", json={"prompt": "It is"}).json()["token_strs"] is None


def test_roles_of_a_models_own_reach_its_template(sent: httpx.Client) -> None:
    body = {"messages": [{"role": "critic", "content": "Too long."}]}
    assert "<|im_start|>critic\nToo long.<|im_end|>" in sent.post("/apply-template", json=body).json()["prompt"]
    assert sent.post("/v1/chat/completions", json={**body, "max_tokens": 1}).status_code == 200


def test_special_tokens_around_a_chat_where_asked_for(sent: httpx.Client, text: TextPipeline) -> None:
    """The template's own text, with the tokens the tokenizer puts around any other."""
    rendered = sent.post("/apply-template", json=CHAT).json()["prompt"]
    for asked in (True, False, None):
        found = sent.post("/tokenize", json={**CHAT, "add_special_tokens": asked}).json()["tokens"]
        assert found == text.tokenizer.encode(rendered, add_special_tokens=asked is True)


def test_a_prompt_is_cut_where_that_is_asked(api: openai.OpenAI, server: Running, text: TextPipeline) -> None:
    ids = text.tokenizer.encode("A table for two at seven, please, by the window.")
    for side, kept in ((None, ids[-5:]), ("left", ids[-5:]), ("right", ids[:5])):
        asked: Any = {"truncate_prompt_tokens": 5, "truncation_side": side}
        api.completions.create(model="scripted", prompt=ids, extra_body=asked, max_tokens=1)
        assert list(server.runner.seen[-1].prompt_ids) == kept
    context = server.engine.scheduler.options.max_model_len
    for path, body in (("/v1/completions", {"prompt": [7] * (context + 9)}), ("/v1/chat/completions", CHAT)):
        more = {"truncate_prompt_tokens": -1, "max_tokens": 10}
        assert httpx.post(server.url + path, json={**body, **more}).status_code == 200
    assert len(server.runner.seen[-2].prompt_ids) == context - 10
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "truncate_prompt_tokens": context + 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_an_answer_begins_with_the_message_it_goes_on_from(api: openai.OpenAI, sent: httpx.Client) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Well, "}]
    more = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    whole = api.chat.completions.create(model="scripted", messages=messages, extra_body=more).choices[0].message
    assert whole.content == "Well, " + ANSWER
    told = chunks(sent, "/v1/chat/completions", {"messages": messages, **more})
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in told) == whole.content
    alone = api.chat.completions.create(model="scripted", messages=HELLO, extra_body={"echo": True})  # type: ignore[arg-type]
    assert alone.choices[0].message.content == ANSWER


def test_tokens_by_their_ids_and_the_prompts_text(api: openai.OpenAI, sent: httpx.Client, server: Running) -> None:
    named = [f"token_id:{token}" for token in server.runner.script]
    asked = {"return_tokens_as_token_ids": True, "return_prompt_text": True}
    chat: Any = api.chat.completions.create(
        model="scripted",
        messages=HELLO,
        logprobs=True,
        top_logprobs=1,
        extra_body=asked,  # type: ignore[arg-type]
    )
    content = chat.choices[0].logprobs.content
    assert [entry.token for entry in content] == named[: len(content)]
    assert [entry.top_logprobs[0].token for entry in content] == [entry.token for entry in content]
    assert "<|im_start|>user\nHello<|im_end|>" in chat.prompt_text
    assert chunks(sent, "/v1/chat/completions", {**CHAT, **asked})[0]["prompt_text"] == chat.prompt_text
    text: Any = api.completions.create(
        model="scripted", prompt="Hello", logprobs=1, extra_body={"return_tokens_as_token_ids": True}
    )
    found = text.choices[0].logprobs
    assert found.tokens == named[: len(found.tokens)]
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]


def test_rendered_prompts_tell_where_tokens_are(sent: httpx.Client) -> None:
    told = sent.post("/v1/chat/completions/render", json={**CHAT, "return_token_offsets": True}).json()
    assert "".join(told["prompt"][start:end] for start, end in told["token_offsets"]) == told["prompt"]
    assert len(told["token_offsets"]) == len(told["token_ids"])
    (text,) = sent.post("/v1/completions/render", json={"prompt": "Wie süß 🦩!", "return_token_offsets": True}).json()
    spans = text["token_offsets"]
    assert all(start < end for start, end in spans)
    assert [start for start, _ in spans] == sorted(start for start, _ in spans)
    assert {place for start, end in spans for place in range(start, end)} == set(range(len("Wie süß 🦩!")))
    assert sent.post("/v1/chat/completions/render", json=CHAT).json()["token_offsets"] is None


def test_an_answer_that_goes_round_in_circles_ends(api: openai.OpenAI, server: Running) -> None:
    size = len(server.runner.script)
    asked = {"repetition_detection": {"max_pattern_size": size, "min_count": 3}, "ignore_eos": True}
    answer: Any = api.completions.create(model="scripted", prompt="Hello", max_tokens=500, n=2, extra_body=asked)
    assert [choice.stop_reason for choice in answer.choices] == ["repetition_detected"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage.completion_tokens == 2 * 3 * size
    server.until_idle()
    short = {"repetition_detection": {"max_pattern_size": size - 1, "min_count": 2}, "ignore_eos": True}
    whole = api.completions.create(model="scripted", prompt="Hello", max_tokens=3 * size, extra_body=short)
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_pattern_size": 4, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": 10_000, "min_count": 2}, "repetition_detection.max_pattern_size"),
    ],
)
def test_patterns_that_mean_nothing(sent: httpx.Client, asked: dict[str, int], param: str) -> None:
    answer = sent.post("/v1/completions", json={**TEXT, "repetition_detection": asked})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
