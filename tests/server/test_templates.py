"""Chat templates by name and from requests: who may bring one, and what a hostile one gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.template import ChatTemplate
from tests.server.support import Running, running, until

ROUTES = ["/v1/chat/completions", "/tokenize", "/v1/tokenize"]
HELLO = [{"role": "user", "content": "hello"}]
NAMED = {
    "default": "plain {{ messages[0].content }}",
    "rag": "{% for d in documents %}{{ d.text }};{% endfor %}{{ messages[0].content }}",
}


@pytest.fixture(scope="module")
def named(text: TextPipeline) -> TextPipeline:
    """A model with two templates."""
    return replace(text, template=ChatTemplate(NAMED))


@pytest.fixture(scope="module")
def careful(named: TextPipeline) -> Iterator[Running]:
    with running(named) as server:
        yield server


@pytest.fixture(scope="module")
def trusting(named: TextPipeline) -> Iterator[Running]:
    with running(named, ServerOptions(trust_request_chat_template=True)) as server:
        yield server


def ask(server: Running, route: str, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, **fields}
    return httpx.post(server.url + route, json=body, timeout=60)


def ids(server: Running, **fields: Any) -> list[int]:
    answer: dict[str, Any] = ask(server, "/tokenize", **fields).json()
    return list(answer["tokens"])


def test_a_models_templates_are_chosen_by_name(careful: Running, text: TextPipeline) -> None:
    documents = [{"text": "one"}, {"text": "two"}]
    rag = text.tokenizer.encode("one;two;hello", add_special_tokens=False)
    assert ids(careful) == text.tokenizer.encode("plain hello", add_special_tokens=False)
    assert ids(careful, chat_template="rag", documents=documents) == rag
    answer = ask(careful, "/v1/chat/completions", chat_template="rag", documents=documents, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len(rag)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "", "unnamed", "{{ ''.__class__ }}"])
def test_other_templates_are_refused_unless_the_server_takes_them(careful: Running, route: str, source: str) -> None:
    answer = ask(careful, route, chat_template=source)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "chat_template"
    assert "default, rag" in error["message"]
    assert "--trust-request-chat-template" in error["message"]


def test_a_trusting_server_takes_a_requests_template(trusting: Running, text: TextPipeline) -> None:
    source = "{{ messages[0].content|upper }}"
    assert ids(trusting, chat_template=source) == text.tokenizer.encode("HELLO", add_special_tokens=False)
    assert ids(trusting) == text.tokenizer.encode("plain hello", add_special_tokens=False)
    assert ask(trusting, "/v1/chat/completions", chat_template=source, max_tokens=1).status_code == 200


HOSTILE = {
    "attribute": "{{ ''.__class__.__mro__ }}",
    "subscript": "{{ messages['__class__'] }}",
    "hidden": "{{ ''['__cl' ~ 'ass__'] }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "format": "{{ ('{0.__cl' ~ 'ass__}').format(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% if %}",
    "output": "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "growth": "{% set ns = namespace(s='ab') %}{% for i in range(1000) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "own refusal": "{{ raise_exception('no') }}",
    "source": "x" * (1 << 20) + "x",
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_the_requests_fault(trusting: Running, route: str, name: str) -> None:
    answer = ask(trusting, route, chat_template=HOSTILE[name])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "template_error"
    assert len(answer.text) < 2000


@pytest.mark.parametrize("route", ROUTES[:2])
def test_an_endless_template_ends_and_does_not_hold_others_up(
    trusting: Running, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    spent, looks = [0.0], itertools.count()
    clock = SimpleNamespace(thread_time=lambda: (next(looks), spent[0])[1])
    monkeypatch.setattr("penstock.text.template_budget.time", clock)
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(ask, trusting, route, chat_template=endless)
        until(lambda: next(looks) > 100_000)
        assert ids(trusting)
        assert not bomb.done()
        spent[0] = 3600.0
        answer = bomb.result()
    assert answer.status_code == 400
    assert "more than 2 s" in answer.json()["error"]["message"]


def test_a_model_without_templates_names_that(text: TextPipeline) -> None:
    with running(replace(text, template=None)) as server:
        answer = ask(server, "/tokenize", chat_template="x")
        assert answer.status_code == 400
        assert "it has none" in answer.json()["error"]["message"]
