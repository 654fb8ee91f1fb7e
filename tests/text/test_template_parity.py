"""Templates render what transformers' apply_chat_template renders, or both refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.config import limits
from penstock.config.errors import PenstockError, RequestError, TemplateError
from penstock.text.template import ChatTemplate
from tests.text.conversations import ANSWER, CONVERSATIONS, DOCUMENTS, TOOLS, USER

# (tools, documents, add_generation_prompt, continue_final_message)
Mode = tuple[Any, Any, bool, bool]
MODES: list[Mode] = [
    *((tools, None, p, f) for tools in (None, TOOLS) for p, f in ((True, False), (False, False), (False, True))),
    (None, DOCUMENTS, True, False),
    (TOOLS, DOCUMENTS, True, False),
]
SOURCES = Path(__file__).resolve().parents[3] / "shared" / "data"
NAMES = sorted(path.name for path in (SOURCES / "templates").glob("*.jinja")) if SOURCES.is_dir() else []
# Both refuse every conversation: every parameter needs a description.
REFUSE_ALL = ("CohereForAI-c4ai-command-r-plus-tool_use.jinja",)
TODAY = "Nov 23 2026 12:00:00 GMT"
WANTED = ("Llama-3.1", "Llama-3.2", "Llama-3.3", "Qwen3-", "Qwen2.5", "Mistral-Nemo", "Mistral-Small", "gemma-2",
          "gemma-4", "gpt-oss")  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """A template refuses a conversation, in its own words or (None) by failing."""

    words: str | None = None


def theirs(source: str, messages: list[dict[str, Any]], mode: Mode) -> str | Refused:
    """transformers' text, or how it refuses."""
    tools, documents, prompt, final = mode
    try:
        result: Any = render_jinja_template(
            [messages],
            tools=tools,
            documents=documents,
            chat_template=source,
            add_generation_prompt=prompt,
            continue_final_message=final,
            bos_token="<s>",
            eos_token="</s>",
            datetime=TODAY,
            functions=json.dumps(tools, ensure_ascii=False, indent=2) if tools else "",
        )
    except Exception as error:
        return Refused(str(error) if type(error) is jinja2.TemplateError else None)
    return str(result[0][0])


def ours(template: ChatTemplate | None, messages: list[dict[str, Any]], mode: Mode) -> str | Refused:
    """Our text, or how we refuse."""
    tools, documents, prompt, final = mode
    try:
        if template is None:
            return Refused()
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=prompt,
            continue_final_message=final,
            datetime=TODAY,
        )
    except PenstockError as error:
        return Refused(str(error))


def same(mine: str | Refused, other: str | Refused) -> bool:
    """Whether text or refusal are the same; failures are told in other words than Python's."""
    if isinstance(mine, Refused) and isinstance(other, Refused):
        return other.words in (None, mine.words)
    return mine == other


def load(source: str) -> ChatTemplate | None:
    try:
        return ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    except TemplateError:
        return None


def compare(source: str) -> Iterator[tuple[str, Mode, str | Refused]]:
    template = load(source)
    for name, messages in CONVERSATIONS.items():
        for mode in MODES:
            text = theirs(source, messages, mode)
            assert same(ours(template, messages, mode), text), (name, mode)
            yield name, mode, text


def test_the_families_that_must_agree_are_there(shared_data: Path) -> None:
    assert shared_data == SOURCES
    assert len(NAMES) >= 70
    assert all(any(wanted in name for name in NAMES) for wanted in WANTED)


@pytest.mark.parametrize("name", NAMES)
def test_every_template_renders_the_same(shared_data: Path, name: str) -> None:
    source = (shared_data / "templates" / name).read_text(encoding="utf-8")
    texts = {(talk, str(mode)): text for talk, mode, text in compare(source) if isinstance(text, str)}
    assert any(texts.values()) or name in REFUSE_ALL
    if "documents" in source and name not in REFUSE_ALL:
        assert any(texts.get((talk, str(MODES[0]))) != texts.get((talk, str(MODES[6]))) for talk in CONVERSATIONS)


def test_the_bundled_models_template_renders_the_same(shared_data: Path) -> None:
    source = (shared_data / "models" / "penstock-concierge" / "chat_template.jinja").read_text(encoding="utf-8")
    assert sum(isinstance(text, str) for _, _, text in compare(source)) >= len(CONVERSATIONS) * len(MODES) // 2


CONSTRUCTS = [
    "{{ messages|tojson }}|{{ messages|tojson(indent=2) }}|{{ {'b':1,'a':'é<'}|tojson(sort_keys=true) }}",
    "{{ messages|tojson(separators=(',', ':')) }}{{ [1,2.0,none,true]|tojson }}",
    "{% generation %}a {{ messages[0].content }} b{% endgeneration %}",
    "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m.role }}{% continue %}x{% endfor %}",
    "  {% if true %}\n  a\n  {% endif %}\n b",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro f(x, y='d') %}[{{ x }}{{ y }}{{ caller() if caller else '' }}]{% endmacro %}"
    "{{ f(1) }}{% call f(2) %}c{% endcall %}",
    "{{ messages[::-1]|length }}{{ 'abc'[1:] }}{{ 'abc'[::-1] }}{{ (1, 2) + (3,) }}{{ [1] + [2] }}{{ 'a' * 3 }}",
    "{{ '%s-%d' % ('a', 3) }}{{ '{:>5}|{x}'.format('a', x=1) }}",
    "{{ '%5.2f'|format(1.5) }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2**10 }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role','equalto','user')|list|length }}",
    "{{ 'a b'.split(' ') }}{{ ', '.join(['a','b']) }}{{ 'aXb'.replace('X', '-') }}",
    "{{ ' x '|trim }}{{ 'a\nb'|indent(2) }}",
    "{{ {'a': 1}.items()|list }}{{ dict(a=1) }}{{ [3,1]|sort }}{{ {'b':1,'a':2}|dictsort }}{{ 'x' ~ 1 ~ none }}",
    "{{ undefined_thing }}{{ undefined_thing is defined }}{{ messages[9] }}{{ messages.nothing is none }}",
    "{{ undefined_thing.attribute }}",
    "{{ undefined_thing ~ 'a' }}{{ undefined_thing + 'a' }}",
    "{{ messages[0].content is string }}{{ messages is iterable }}{{ 1 in [1] }}{{ 1 < 2 < 3 }}{{ tools is none }}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}",
    "{% for x in [] %}{% else %}e{% endfor %}",
    "{% for i in range(5) if i is odd %}{{ i }}{{ loop.last }}{{ loop.previtem }}{% endfor %}{{ loop }}",
    "{% for x in [[1,[2]],3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{{ documents is none }}",
    "{{ raise_exception('no') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ 1/0 }}",
    "{{ 'é'|safe }}{{ '<'|e }}{{ none }}{{ true }}{{ 1.0 }}{{ 'a'|upper|lower|title|capitalize }}{{ '5'|int + 1 }}",
    "{% if messages %}{% elif tools %}{% endif",
    "{{ 'a'|no_such_filter }}",
]


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_every_construct_renders_the_same(source: str) -> None:
    for mode in MODES:
        for messages in ([USER], [USER, ANSWER]):
            if mode[3] and "content" not in source:
                continue  # transformers looks for that word before it continues a message
            assert same(ours(load(source), messages, mode), theirs(source, messages, mode))


def test_named_templates_are_chosen_by_use() -> None:
    named = {"default": "plain", "tool_use": "tools"}
    as_list = [{"name": name, "template": text} for name, text in named.items()]
    for source in (named, as_list):
        template = ChatTemplate(source)
        assert template.render([]) == "plain"
        assert template.render([], tools=[]) == "tools"
    assert ChatTemplate({"default": "plain"}).render([], tools=TOOLS) == "plain"
    with pytest.raises(TemplateError, match="rag"):
        ChatTemplate({"rag": "x"}).render([])
    template = ChatTemplate({"rag": "x", "default": "y"})
    assert [template.render([], chat_template=name) for name in ("rag", "default", "{{ 1 + 1 }}")] == ["x", "y", "2"]
    for wrong in ("{% if %}", "{{ ''.__class__ }}", "x" * (limits.MAX_TEMPLATE_SOURCE_CHARS + 1)):
        with pytest.raises(TemplateError):
            template.render([], chat_template=wrong)


def test_a_configs_tokens_reach_the_template() -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ pad_token }}{{ eos_token is defined }}",
        "bos_token": {"content": "<s>"},
        "pad_token": "<p>",
        "eos_token": None,
    }
    assert ChatTemplate.from_config(config).render([]) == "<s><p>False"
    for absent in ({}, {"chat_template": None}):
        with pytest.raises(TemplateError, match="no chat template"):
            ChatTemplate.from_config(absent)
    for wrong in (5, [], {}, [1], {"default": 1}, [{"name": "default"}]):
        with pytest.raises(TemplateError):
            ChatTemplate.from_config({"chat_template": wrong})


def test_the_callers_messages_are_left_alone() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "t"}]
    template = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].content[0].text }}")
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == "ta"
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "t"}]


@pytest.mark.parametrize("name", ["messages", "conversation", "bos_token", "raise_exception", "_x", "a b"])
def test_reserved_variables_are_refused(name: str) -> None:
    variables: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError, match="reserved"):
        ChatTemplate("x").render([], **variables)


def test_further_variables_reach_the_template() -> None:
    assert (
        ChatTemplate("{{ enable_thinking }}{{ more.a }}").render([], enable_thinking=False, more={"a": 1}) == "False1"
    )
    with pytest.raises(RequestError, match="JSON"):
        ChatTemplate("x").render([], thing=object())


def test_wrong_messages_are_the_requests_fault() -> None:
    template = ChatTemplate("{{ messages }}")
    wrong: Any = ["text"]
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        template.render(wrong)
    with pytest.raises(RequestError, match="both true"):
        template.render([ANSWER], continue_final_message=True)
    for last in ([], [{"role": "assistant"}], [{"role": "assistant", "content": []}]):
        with pytest.raises(RequestError, match="continue"):
            template.render(last, add_generation_prompt=False, continue_final_message=True)
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        template.render([{"role": "user", "content": deep}])


def test_the_time_and_the_functions_are_told_where_a_template_reads_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    reads = ChatTemplate("{{ datetime }}|{{ functions }}")
    time, _, functions = reads.render([], tools=tools).partition("|")
    assert datetime.strptime(time, "%b %d %Y %H:%M:%S GMT").year >= 2026
    assert json.loads(functions) == tools
    assert reads.render([], datetime="then", functions="none") == "then|none"
    assert reads.render([], datetime="then") == "then|"
    own = "{% set datetime = 1 %}{{ datetime }}{{ functions is defined }}{% if false %}datetime functions{% endif %}"
    assert ChatTemplate(own).render([]) == "1True"
    assert ChatTemplate("functions{{ x is defined }}").render([]) == "functionsFalse"
