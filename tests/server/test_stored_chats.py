"""Chats that are kept, over the openai package: whole and streamed, listed, changed, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.config import limits
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running

HELLO: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
]


@pytest.fixture
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_found_again(api: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "metadata": {"of": "tea"}, "seed": 5}
    answer: Any = api.chat.completions.create(**asked, store=True, stream=stream)
    name = list(answer)[-1].id if stream else answer.id
    kept: Any = api.chat.completions.retrieve(name)
    assert (kept.id, kept.object, kept.model) == (name, "chat.completion", "scripted")
    assert [choice.message.content for choice in kept.choices] == [ANSWER]
    assert (kept.choices[0].finish_reason, kept.usage.completion_tokens > 0) == ("stop", True)
    assert (kept.metadata, kept.seed) == ({"of": "tea"}, 5)
    if not stream:
        assert (kept.choices, kept.usage, kept.created) == (answer.choices, answer.usage, answer.created)
    messages = list(api.chat.completions.messages.list(name, limit=1))
    assert [(each.role, each.content) for each in messages] == [("system", "Be kind."), ("user", "Hello")]
    assert [each.id for each in messages] == [f"{name}-0", f"{name}-1"]
    assert [part.text for part in messages[1].content_parts] == ["Hel", "lo"]
    assert messages[0].content_parts is None
    assert api.chat.completions.delete(name).deleted
    with pytest.raises(openai.NotFoundError, match="Chat completion with id"):
        api.chat.completions.retrieve(name)


def test_lists_are_by_age_model_and_metadata(api: openai.OpenAI) -> None:
    def made(**more: Any) -> str:
        return str(api.chat.completions.create(model="scripted", messages=HELLO, max_tokens=2, **more).id)

    names = [made(store=True, metadata={"number": str(number), "of": "tea"}) for number in range(3)]
    made()
    made(store=False)
    listed = api.chat.completions.list
    assert [chat.id for chat in listed(limit=2)] == names  # over two pages
    assert [chat.id for chat in listed(order="desc").data] == names[::-1]
    assert [chat.id for chat in listed(after=names[0])] == names[1:]
    assert [chat.id for chat in listed(model="scripted")] == names
    assert list(listed(model="another")) == []
    assert [chat.id for chat in listed(metadata={"number": "1", "of": "tea"})] == names[1:2]
    changed = api.chat.completions.update(names[1], metadata={"number": "one"})
    assert (changed.id, changed.metadata) == (names[1], {"number": "one"})
    assert [chat.id for chat in listed(metadata={"number": "one"})] == names[1:2]
    assert [chat.id for chat in listed()] == names
    with pytest.raises(openai.BadRequestError, match=r"after is .nothing."):
        listed(after="nothing")


def test_pages_end_where_they_are_large(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        api.chat.completions.create(model="scripted", messages=HELLO, store=True, metadata={"of": "pages"}).id
        for _ in range(3)
    ]
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 100)
    page = api.chat.completions.list(limit=3, metadata={"of": "pages"})
    assert ([chat.id for chat in page.data], page.has_more) == (names[:1], True)
    assert [chat.id for chat in page] == names


@pytest.mark.parametrize("metadata", [{"a": 5}, {"a": "x" * 513}, {str(number): "" for number in range(17)}], ids=len)
def test_metadata_that_cannot_be_kept(server: Running, metadata: dict[str, Any]) -> None:
    body = {"messages": HELLO, "metadata": metadata, "max_tokens": 2}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "store": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("metadata")
    assert not server.runner.seen
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


def test_owners_see_their_own_alone_even_under_one_name(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("one", "two"))) as server:
        clients = [httpx.Client(base_url=server.url, headers={"x-api-key": key}) for key in ("one", "two")]
        one, two = clients
        body = {"messages": HELLO, "store": True, "request_id": "same", "max_tokens": 2}
        path = "/v1/chat/completions"
        name = one.post(path, json=body).json()["id"]
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
            assert two.request(method, f"{path}/{name}{rest}").status_code == 404
        assert two.post(f"{path}/{name}", json={"metadata": {}}).status_code == 404
        assert two.get(path).json()["data"] == []
        two.post(path, json={**body, "metadata": {"of": "two"}})
        assert one.get(f"{path}/{name}").json()["metadata"] == {}
        assert two.get(f"{path}/{name}").json()["metadata"] == {"of": "two"}
        for client in clients:
            client.close()
