"""Conversations over the openai package: kept, gone on from, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.conversations.kept import Conversations, with_items
from penstock.server.store import Record, ResponseStore
from tests.server.support import ANSWER, Running, running, until


@pytest.fixture
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def test_a_conversation_lives(api: openai.OpenAI) -> None:
    made = api.conversations.create(metadata={"topic": "tea"}, items=[said("Hello")])
    assert (made.object, made.metadata) == ("conversation", {"topic": "tea"})
    assert api.conversations.retrieve(made.id) == made
    changed = api.conversations.update(made.id, metadata={"topic": "coffee"})
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"topic": "coffee"})
    added = api.conversations.items.create(made.id, items=[said("Hi.", "assistant"), said("A table?")])
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
    listed = api.conversations.items.list(made.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed] == ["Hello", "Hi.", "A table?"]  # over two pages
    assert [item.content[0].type for item in api.conversations.items.list(made.id)] == [
        *("input_text", "output_text", "input_text")
    ]
    first = added.data[0]
    assert api.conversations.items.retrieve(first.id, conversation_id=made.id) == first
    assert api.conversations.items.delete(first.id, conversation_id=made.id) == changed
    with pytest.raises(openai.NotFoundError, match=f"Item with id .{first.id}. not found"):
        api.conversations.items.retrieve(first.id, conversation_id=made.id)
    assert api.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match=f"Conversation with id .{made.id}. not found"):
        api.conversations.retrieve(made.id)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}, {"store": False}], ids=str)
def test_responses_go_on_from_it_and_are_added(api: openai.OpenAI, server: Running, more: dict[str, Any]) -> None:
    name = api.conversations.create(items=[said("Be kind.", "system")]).id
    for asked in ("Hello", "And a menu?"):
        answer = api.responses.create(model="scripted", input=asked, conversation=name, **more)
        if "stream" in more:
            answer = list(answer)[-1].response
        assert answer.conversation.id == name
        wanted = 3 if asked == "Hello" else 5
        until(lambda: len(list(api.conversations.items.list(name))) == wanted)  # noqa: B023
    texts = [item.content[0].text for item in api.conversations.items.list(name, order="asc")]
    assert texts == ["Be kind.", "Hello", ANSWER, "And a menu?", ANSWER]
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    api.chat.completions.create(model="scripted", messages=chat)
    assert server.runner.seen[1].prompt_ids == server.runner.seen[2].prompt_ids


def test_calls_of_a_conversation_get_their_outputs(api: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "menu", "arguments": "{}"}
    name = api.conversations.create(items=[said("Menu?"), call]).id
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Soup"}
    assert api.responses.create(model="scripted", input=[result], conversation={"id": name}).status == "completed"
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]\.call_id is .call_2."):
        api.conversations.items.create(name, items=[{**result, "call_id": "call_2"}])


def test_an_answer_that_fails_adds_nothing(api: openai.OpenAI, server: Running) -> None:
    name = api.conversations.create(items=[said("Hello")]).id
    server.runner.die_after = 1
    answer = api.responses.create(model="scripted", input="More", conversation=name)
    assert answer.status == "failed"
    assert len(list(api.conversations.items.list(name))) == 1


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"conversation": "conv_x"}, 404, 'Conversation with id "conv_x" not found'),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, 400, "only without previous_response_id"),
        ({"conversation": 5}, 400, "conversation"),
        ({"conversation": {"name": "x"}}, 400, "conversation"),
    ],
)
def test_conversations_that_cannot_be(server: Running, body: dict[str, Any], status: int, told: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "Hello", **body})
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]
    assert not server.runner.seen


def test_items_that_cannot_be_added(api: openai.OpenAI) -> None:
    name = api.conversations.create().id
    for items, told in (
        ([said("x")] * (limits.MAX_ITEMS_PER_CALL + 1), "items"),
        ([{"type": "image"}], r"items\[0\]\.type is .image."),
        ([said("x") | {"id": "msg_1"}, said("y") | {"id": "msg_1"}], r"items\[1\]\.id is .msg_1."),
        ([], "items"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            api.conversations.items.create(name, items=items)
    assert list(api.conversations.items.list(name)) == []
    with pytest.raises(openai.BadRequestError, match="metadata"):
        api.conversations.create(metadata={"a": 5})


def test_owners_see_their_own_alone(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("one", "two"))) as server:
        one, two = (httpx.Client(base_url=server.url, headers={"x-api-key": key}) for key in ("one", "two"))
        name = one.post("/v1/conversations", json={"items": [said("Hello") | {"id": "msg_1"}]}).json()["id"]
        at = f"/v1/conversations/{name}"
        for method, path in (("GET", at), ("DELETE", at), ("GET", f"{at}/items"), ("GET", f"{at}/items/msg_1")):
            assert two.request(method, path).status_code == 404
        for path, body in ((at, {"metadata": {}}), (f"{at}/items", {"items": [said("x")]})):
            assert two.post(path, json=body).status_code == 404
        assert two.post("/v1/responses", json={"input": "x", "conversation": name}).status_code == 404
        assert len(one.get(f"{at}/items").json()["data"]) == 1
        one.close()
        two.close()


async def test_processes_of_one_server_add_to_one_conversation(tmp_path: Path) -> None:
    file = str(tmp_path / "responses")
    stores = [ResponseStore(file, shared=True) for _ in range(2)]
    await stores[0].put("me", Record({"id": "conv_1"}, []))
    adding = (Conversations(stores[n % 2]).remember("me", "conv_1", [{"id": f"msg_{n}"}]) for n in range(40))
    await asyncio.gather(*adding)
    found = [(await Conversations(store).found("me", "conv_1")).items for store in stores]
    assert found[0] == found[1]
    assert {item["id"] for item in found[0]} == {f"msg_{n}" for n in range(40)}
    assert [[item for item in found[0] if int(item["id"][4:]) % 2 == which] for which in (0, 1)] == [
        [{"id": f"msg_{n}"} for n in range(which, 40, 2)] for which in (0, 1)
    ]
    for store in stores:
        await store.aclose()


async def test_a_full_conversation_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    await store.put("me", Record({"id": "conv_1"}, [{"id": "msg_0"}]))
    monkeypatch.setattr(limits, "MAX_MESSAGES", 2)
    kept = Conversations(store)
    await kept.remember("me", "conv_1", [{"id": "msg_1"}])
    await kept.remember("me", "conv_1", [{"id": "msg_2"}])  # which is logged
    assert len((await kept.found("me", "conv_1")).items) == 2
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 20)
    with pytest.raises(RequestError, match="begin another conversation"):
        with_items(Record({}, []), [{"id": "msg_9", "text": "long enough"}])
    await store.aclose()


def test_a_record_of_another_kind_is_none(text: TextPipeline) -> None:
    with running(text) as server:
        client = httpx.Client(base_url=server.url)
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "store": True}
        names = [
            client.post("/v1/conversations", json={}).json()["id"],
            client.post("/v1/responses", json={"input": "Hi"}).json()["id"],
            client.post("/v1/chat/completions", json=chat).json()["id"],
        ]
        conversation, response, stored = names
        for name in (conversation, stored):
            told = client.post("/v1/responses", json={"input": "x", "previous_response_id": name})
            assert (told.status_code, told.json()["error"]["code"]) == (400, "previous_response_not_found")
        before = client.get(f"/v1/responses/{response}/input_items").json()
        for name in (response, stored):
            told = client.post("/v1/responses", json={"input": "x", "conversation": name})
            assert (told.status_code, told.json()["error"]["code"]) == (404, "conversation_not_found")
        assert client.get(f"/v1/responses/{response}/input_items").json() == before
        twice = [{"role": "user", "content": "a", "id": "msg_1"}] * 2
        told = client.post("/v1/responses", json={"input": twice, "conversation": conversation})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "input[1].id")
        assert len(server.runner.seen) == 2  # nothing was computed for what is refused
        client.close()
