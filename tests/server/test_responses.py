"""The openai package's Responses API against the real application, over a socket, and a scripted runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running, until


@pytest.fixture
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_create_and_retrieve(api: openai.OpenAI, server: Running) -> None:
    answer = api.responses.create(model="scripted", input="Hello", instructions="Be kind.", metadata={"a": "b"})
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model, answer.output_text) == (
        *("response", "completed", "scripted"),
        ANSWER,
    )
    assert answer.metadata == {"a": "b"}
    message = answer.output[0]
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    prompt = server.runner.seen[0].prompt_ids
    assert answer.usage.input_tokens == len(prompt)
    assert answer.usage.output_tokens == len(server.runner.script)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    api.chat.completions.create(model="scripted", messages=chat)
    assert server.runner.seen[1].prompt_ids == prompt
    assert api.responses.retrieve(answer.id) == answer


def test_stream_events_in_order(api: openai.OpenAI, server: Running) -> None:
    events = list(api.responses.create(model="scripted", input="Hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    deltas = names.count("response.output_text.delta")
    assert deltas > 3
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    last = events[-1].response
    assert last.output_text == ANSWER
    assert api.responses.retrieve(last.id) == last
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {last.output[0].id}
    whole = api.responses.create(model="scripted", input="Hello")
    assert whole.output[0].content == last.output[0].content
    assert whole.usage.output_tokens == last.usage.output_tokens


def test_the_clients_stream_helper(api: openai.OpenAI) -> None:
    with api.responses.stream(model="scripted", input="Hello") as stream:
        kinds = {event.type for event in stream}
        assert "response.output_text.delta" in kinds
        assert stream.get_final_response().output_text == ANSWER


def test_a_conversation_goes_on(api: openai.OpenAI, server: Running) -> None:
    first = api.responses.create(model="scripted", input="Hello")
    second = api.responses.create(model="scripted", input="And now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 16
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    api.chat.completions.create(model="scripted", messages=[*chat, {"role": "user", "content": "And now?"}])
    assert server.runner.seen[1].prompt_ids == server.runner.seen[2].prompt_ids
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.create(model="scripted", input="x", previous_response_id="resp_unknown")
    assert error.value.param == "previous_response_id"
    assert error.value.code == "previous_response_not_found"


def test_input_items_in_pages(api: openai.OpenAI) -> None:
    first = api.responses.create(model="scripted", input="One")
    second = api.responses.create(
        model="scripted",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Two"}]}],
        previous_response_id=first.id,
    )
    items = list(api.responses.input_items.list(second.id, order="asc"))
    assert [(item.role, item.content[0].text) for item in items] == [
        *(("user", "One"), ("assistant", ANSWER)),
        ("user", "Two"),
    ]
    page = api.responses.input_items.list(second.id, limit=1)
    assert page.data[0].id == items[2].id and page.has_more
    assert [item.id for item in page] == [item.id for item in reversed(items)]
    rest = api.responses.input_items.list(second.id, after=items[0].id, order="asc")
    assert [item.id for item in rest.data] == [item.id for item in items[1:]]
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.input_items.list(second.id, after="nothing")
    assert error.value.param == "after"


def test_delete(api: openai.OpenAI) -> None:
    answer = api.responses.create(model="scripted", input="Hello")
    api.responses.delete(answer.id)
    for action in (api.responses.retrieve, api.responses.delete, api.responses.cancel, api.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            action(answer.id)


def test_what_is_not_stored_is_gone(api: openai.OpenAI) -> None:
    answer = api.responses.create(model="scripted", input="Hello", store=False)
    assert answer.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(answer.id)


def test_max_output_tokens(api: openai.OpenAI) -> None:
    answer = api.responses.create(model="scripted", input="Hello", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 3
    events = list(api.responses.create(model="scripted", input="Hello", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs(api: openai.OpenAI, server: Running) -> None:
    wanted: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = api.responses.create(model="scripted", input="Hello", **wanted)
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith(ANSWER)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = list(api.responses.create(model="scripted", input="Hello", stream=True, **wanted))
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in entries][: len(told)]


def test_background(api: openai.OpenAI, server: Running) -> None:
    server.runner.hold(5)
    answer = api.responses.create(model="scripted", input="Hello", background=True)
    assert answer.status == "queued" and answer.background
    until(lambda: api.responses.retrieve(answer.id).status == "in_progress")
    server.runner.go()
    until(lambda: api.responses.retrieve(answer.id).status == "completed")
    found = api.responses.retrieve(answer.id)
    assert found.output_text == ANSWER
    events = list(api.responses.retrieve(answer.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].response == found
    rest = list(api.responses.retrieve(answer.id, stream=True, starting_after=5))
    assert rest == events[6:]


def test_background_survives_its_client(api: openai.OpenAI, server: Running) -> None:
    server.runner.hold(5)
    seen = []
    with api.responses.create(model="scripted", input="Hello", background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    name = seen[0].response.id
    assert api.responses.retrieve(name).status == "in_progress"
    server.runner.go()
    rest = list(api.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    numbers = [event.sequence_number for event in (*seen, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    text = [event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta"]
    assert "".join(text) == ANSWER == rest[-1].response.output_text


def test_the_clients_helper_follows_what_runs_in_the_background(api: openai.OpenAI, server: Running) -> None:
    server.runner.delay = 0.02
    name = api.responses.create(model="scripted", input="Hello", background=True).id
    with api.responses.stream(response_id=name) as stream:
        numbers = [event.sequence_number for event in stream]
        assert stream.get_final_response().output_text == ANSWER
    with api.responses.stream(response_id=name, starting_after=4) as stream:
        assert [event.sequence_number for event in stream] == numbers[5:]
        assert stream.get_final_response().output_text == ANSWER


def test_cancel(api: openai.OpenAI, server: Running) -> None:
    server.runner.hold(5)
    answer = api.responses.create(model="scripted", input="Hello", background=True)
    assert server.runner.held.wait(60)
    assert api.responses.cancel(answer.id).status == "cancelled"
    server.runner.go()
    server.until_idle()
    said = api.responses.retrieve(answer.id).output[0]
    assert said.status == "incomplete" and ANSWER.startswith(said.content[0].text)
    assert api.responses.retrieve(answer.id).status == "cancelled"
    assert api.responses.cancel(answer.id).status == "cancelled"
    with pytest.raises(openai.APIError, match="cancelled") as ended:
        list(api.responses.retrieve(answer.id, stream=True))
    assert ended.value.code == "cancelled"
    whole = api.responses.create(model="scripted", input="Hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(whole.id)


def test_deleting_what_runs_ends_it(api: openai.OpenAI, server: Running) -> None:
    server.runner.hold()
    answer = api.responses.create(model="scripted", input="Hello", background=True)
    until(lambda: server.live == 1)
    cancelled = server.cancelled
    api.responses.delete(answer.id)
    server.runner.go()
    server.until_idle()
    assert server.cancelled == cancelled + 1
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(answer.id)


def test_failures(api: openai.OpenAI, server: Running) -> None:
    server.runner.die_after = 2
    answer = api.responses.create(model="scripted", input="Hello", background=True)
    until(lambda: api.responses.retrieve(answer.id).status == "failed")
    failed = api.responses.retrieve(answer.id)
    assert (failed.error.code, failed.error.message) == ("server_error", "The engine stopped.")
    events = list(api.responses.create(model="scripted", input="Hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "The engine stopped."


def test_a_client_that_leaves_ends_what_is_not_in_the_background(api: openai.OpenAI, server: Running) -> None:
    server.runner.hold()
    cancelled = server.cancelled
    with api.responses.create(model="scripted", input="Hello", stream=True) as stream:
        next(iter(stream))
        until(lambda: server.live == 1)
    until(lambda: server.lifecycle.in_flight == 0)
    server.runner.go()
    server.until_idle()
    assert server.cancelled == cancelled + 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_unknown_1"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "store"),
        ({"stream_options": {}}, "stream_options"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"truncation": "some"}, "truncation"),
        ({"temperature": -1}, "temperature"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_refusals_name_the_field(api: openai.OpenAI, server: Running, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        api.post("/responses", cast_to=object, body={"input": "Hello", **body})
    assert error.value.param == param
    assert server.live == 0


def test_items_become_one_chat(api: openai.OpenAI, server: Running) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Book a table."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "book", "arguments": '{"seats": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Booked."}]},
        {"role": "user", "content": "Thanks."},
    ]
    tool = {"name": "book", "description": "Books.", "parameters": {"type": "object", "properties": {}}}
    api.responses.create(model="scripted", input=items, tools=[{"type": "function", "strict": None, **tool}])
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"seats": 2}'}}
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Book a table."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "book", "content": "done"},
        {"role": "assistant", "content": "Booked."},
        {"role": "user", "content": "Thanks."},
    ]
    api.chat.completions.create(model="scripted", messages=chat, tools=[{"type": "function", "function": tool}])
    assert server.runner.seen[0].prompt_ids == server.runner.seen[1].prompt_ids


@pytest.mark.parametrize("content", ["another's", "penstock1.*", "penstock1.Zg", "penstock1.", "", 7])
def test_opaque_content_that_is_not_ours_is_told(api: openai.OpenAI, content: Any) -> None:
    items: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": content},
        {"role": "user", "content": "Hello?"},
    ]
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.create(model="scripted", input=items)
    assert error.value.param == "input[1].encrypted_content"


def test_references_to_stored_items(api: openai.OpenAI, server: Running) -> None:
    first = api.responses.create(model="scripted", input="Hello")
    asked = api.responses.input_items.list(first.id).data[0]
    items: list[Any] = [{"type": "item_reference", "id": item.id} for item in (asked, first.output[0])]
    api.responses.create(model="scripted", input=[*items, {"role": "user", "content": "And now?"}])
    api.responses.create(model="scripted", input="And now?", previous_response_id=first.id)
    assert server.runner.seen[1].prompt_ids == server.runner.seen[2].prompt_ids
    with pytest.raises(openai.BadRequestError, match="once"):  # a body of references would else be of any size
        api.responses.create(model="scripted", input=[items[0], items[0]])


def test_input_tokens(api: openai.OpenAI) -> None:
    counted = api.responses.input_tokens.count(model="scripted", input="Hello", instructions="Be kind.")
    answer = api.responses.create(model="scripted", input="Hello", instructions="Be kind.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)


def test_keys_see_their_own_alone(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("one", "two"))) as server:
        one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        answer = one.responses.create(model="scripted", input="Hello")
        server.runner.delay = 0.05
        job = one.responses.create(model="scripted", input="Hello", background=True)
        for name in (answer.id, job.id):
            for action in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    action(name)
        with pytest.raises(openai.BadRequestError):
            two.responses.create(model="scripted", input="x", previous_response_id=answer.id)
        assert one.responses.retrieve(answer.id) == answer
        one.close()
        two.close()


def test_truncation_drops_the_oldest_turns_where_asked(api: openai.OpenAI, server: Running, text: TextPipeline) -> None:
    items: list[Any] = [{"role": "system", "content": "Be kind."}]
    for number in range(60):
        said = f"Turn {number}. " + "word " * 100
        items += [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]
    items.append({"role": "user", "content": "And now?"})
    context = server.client.info.max_model_len
    answer = api.responses.create(model="scripted", input=items, truncation="auto", max_output_tokens=50)
    assert answer.truncation == "auto"
    shown = server.runner.seen[0].prompt_ids
    prompt = text.tokenizer.decode(list(shown), skip_special_tokens=False)
    assert "Be kind." in prompt and "And now?" in prompt
    kept = [number for number in range(60) if f"Turn {number}. " in prompt]
    assert kept == list(range(60 - len(kept), 60)) and kept
    turn = len(shown) // len(kept)
    assert context - 50 - 2 * turn < len(shown) <= context - 50, "no more than needed is dropped"
    short = api.responses.create(model="scripted", input=items[:3], truncation="auto", max_output_tokens=50)
    assert short.usage.input_tokens == api.responses.input_tokens.count(input=items[:3]).input_tokens
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.create(model="scripted", input=items, max_output_tokens=50)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")


def test_the_server_waits_for_what_runs_in_the_background(api: openai.OpenAI, server: Running) -> None:
    server.runner.hold()
    answer = api.responses.create(model="scripted", input="Hello", background=True)
    until(lambda: server.live == 1)
    assert server.lifecycle.in_flight >= 1
    server.runner.go()
    until(lambda: server.lifecycle.in_flight == 0)
    assert api.responses.retrieve(answer.id).output_text == ANSWER
