"""The anthropic package against the real application, over a socket, and a real engine with a scripted runner."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        yield api


def test_create(api: anthropic.Anthropic, server: Running) -> None:
    answer = api.messages.create(model="scripted", max_tokens=100, messages=HELLO, system="Be kind.")
    assert answer.id.startswith("msg_")
    assert answer._request_id
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "scripted")
    # A list, where the schema has null too: the AI SDK (@ai-sdk/anthropic) takes nothing else.
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": ANSWER, "citations": []}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    request = server.runner.seen[0]
    assert answer.usage.input_tokens == len(request.prompt_ids) - request.computed
    assert answer.usage.cache_read_input_tokens == request.computed
    assert answer.usage.output_tokens == len(server.runner.script)


def test_a_stream_has_all_events_and_is_the_whole(api: anthropic.Anthropic) -> None:
    api.messages.create(model="scripted", max_tokens=100, messages=HELLO)  # from here on the prompt is cached
    whole = api.messages.create(model="scripted", max_tokens=100, messages=HELLO)
    assert whole.usage.cache_read_input_tokens > 0
    events = list(api.messages.create(model="scripted", max_tokens=100, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with api.messages.stream(model="scripted", max_tokens=100, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    unlike = {"id", "parsed_output"}
    assert final.usage.to_dict() == whole.usage.to_dict()
    assert (final.stop_reason, final.content[0].text) == (whole.stop_reason, whole.content[0].text)
    assert {key for key in final.to_dict() if final.to_dict()[key] != whole.to_dict().get(key)} <= unlike | {"content"}


def test_a_stream_on_the_wire(server: Running) -> None:
    body = {"model": "scripted", "max_tokens": 3, "messages": HELLO, "stream": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-1] == "message_stop"
    assert '"stop_reason":"max_tokens"' in answer.text


def test_stop_sequences(api: anthropic.Anthropic) -> None:
    answer = api.messages.create(model="scripted", max_tokens=100, messages=HELLO, stop_sequences=[" for"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " for")
    assert answer.content[0].text == ANSWER.split(" for")[0]


def test_sampling(api: anthropic.Anthropic, server: Running) -> None:
    api.messages.create(model="scripted", max_tokens=2, messages=HELLO)
    own = {"temperature": 0.25, "top_p": 0, "top_k": 7}  # fields newer clients have no argument for
    api.messages.create(model="scripted", max_tokens=2, messages=HELLO, extra_body=own)
    first, second = (request.sampling for request in server.runner.seen)
    assert (first.temperature, first.top_p) == (0.6, 0.95)
    assert (second.temperature, second.top_k, second.max_tokens) == (0.25, 7, 2)
    assert 0 < second.top_p < 1e-6


@pytest.mark.parametrize("beyond", [-1, 10**9])
def test_more_tokens_than_fit_end_with_the_context(api: anthropic.Anthropic, server: Running, beyond: int) -> None:
    context = server.client.info.max_model_len
    server.runner.script = server.runner.script[:-1]  # never ends by itself
    try:
        stream = api.messages.create(model="scripted", max_tokens=context + beyond, messages=HELLO, stream=True)
        events = list(stream)
    finally:
        server.runner.script = (*server.runner.script, server.runner.seen[0].stop_ids[0])
    assert events[-2].delta.stop_reason == "model_context_window_exceeded"
    assert events[-2].usage.output_tokens + len(server.runner.seen[0].prompt_ids) == context


def test_no_tokens_only_warm_the_cache(api: anthropic.Anthropic) -> None:
    hello = [{"role": "user", "content": "Something that was never said before."}]
    cold = api.messages.create(model="scripted", max_tokens=0, messages=hello)
    assert (cold.content, cold.stop_reason, cold.usage.output_tokens) == ([], "max_tokens", 0)
    warm = api.messages.create(model="scripted", max_tokens=1, messages=hello)
    assert warm.usage.input_tokens == 1


def test_count_tokens(api: anthropic.Anthropic) -> None:
    given = {"model": "scripted", "messages": HELLO, "system": [{"type": "text", "text": "Be kind."}]}
    count = api.messages.count_tokens(**given)
    answer = api.messages.create(**given, max_tokens=1)
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    tool = {"name": "book", "input_schema": {"type": "object"}}
    assert api.messages.count_tokens(**given, tools=[tool]).input_tokens > count.input_tokens


def test_models(api: anthropic.Anthropic, server: Running) -> None:
    assert [model.id for model in api.models.list()] == ["scripted"]
    model = api.models.retrieve("scripted")
    assert (model.type, model.display_name) == ("model", "scripted")
    assert model.max_input_tokens == server.client.info.max_model_len
    with pytest.raises(anthropic.NotFoundError) as refused:
        api.models.retrieve("other")
    assert refused.value.type == "not_found_error"


def test_betas_may_send_fields_that_are_new(api: anthropic.Anthropic) -> None:
    extra = {"tomorrows_field": 1}
    answer = api.beta.messages.create(
        model="scripted", max_tokens=100, messages=HELLO, betas=["tomorrow-2030-01-01"], extra_body=extra
    )
    assert answer.content[0].text == ANSWER
    with pytest.raises(anthropic.BadRequestError, match='Unknown parameter: "tomorrows_field"'):
        api.messages.create(model="scripted", max_tokens=100, messages=HELLO, extra_body=extra)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "book", "input": {}}]}
TOOL = {"name": "book", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 'messages[0].content[0].type is "image"'),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, '"document"'),
        ({"messages": [{"role": "robot", "content": "x"}]}, 'messages[0].role is "robot"'),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is []"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] is null"),
        ({"messages": []}, "messages is []"),
        ({"messages": [*HELLO, CALL]}, "messages[1] ends with a tool_use"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]}]},
            'messages[0].content[0].tool_use_id is "b"',
        ),
        ({"max_tokens": -1}, "max_tokens is -1; allowed: at least 0"),
        ({"extra_body": {"temperature": "hot"}}, 'temperature is "hot"; allowed: a number'),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 'tools[0].type is "web_search_20250305"'),
        ({"tools": [{"name": "book"}]}, "tools[0].input_schema is null"),
        ({"tool_choice": {"type": "any"}}, 'tool_choice.type is "any"'),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, 'tool_choice.name is "x"'),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "often"}}, 'thinking.type is "often"'),
        ({"system": [IMAGE]}, 'system[0].type is "image"'),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is"),
    ],
)
def test_refusals(api: anthropic.Anthropic, server: Running, change: dict[str, object], said: str) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": HELLO, **change}
    with pytest.raises(anthropic.BadRequestError) as refused:
        api.messages.create(**body)  # type: ignore[call-overload]
    error = refused.value
    assert error.type == "invalid_request_error"
    assert said in str(error.body["error"]["message"])  # type: ignore[index]
    assert error.request_id == error.body["request_id"]  # type: ignore[index]
    assert not server.runner.seen


def test_an_unknown_model_and_a_missing_field(api: anthropic.Anthropic, server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        api.messages.create(model="claude", max_tokens=5, messages=HELLO)
    assert (refused.value.type, refused.value.error_code) == ("not_found_error", "model_not_found")
    answer = httpx.post(f"{server.url}/v1/messages", json={"model": "scripted", "messages": HELLO})
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "max_tokens is required.",
        "details": {"error_code": "missing_required_parameter"},
    }


def test_a_failure_within_a_stream_is_an_error_event(api: anthropic.Anthropic, server: Running) -> None:
    server.runner.die_after = 2
    with pytest.raises(anthropic.APIStatusError) as failed:
        list(api.messages.create(model="scripted", max_tokens=100, messages=HELLO, stream=True))
    assert failed.value.type == "api_error"


def test_keys(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("secret",))) as server:
        given = {"model": "scripted", "max_tokens": 1, "messages": HELLO}
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert httpx.post(f"{server.url}/v1/messages", json=given, headers=headers).status_code == 200
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as api,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            api.messages.create(**given)  # type: ignore[call-overload]
        assert refused.value.type == "authentication_error"
        assert refused.value.request_id


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
def test_routes_that_are_not_there(server: Running, method: str, path: str, status: int, kind: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"]
