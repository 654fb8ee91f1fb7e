"""Go chat templates as Jinja: what Go would write, written by the sandbox that renders chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.errors import TemplateError
from penstock.library.template.conversation import conversation_template
from penstock.library.template.jinja import translate
from penstock.text.template import ChatTemplate

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'Say {{ "hi" }} %} 🙂 \\n now'}
ANSWER = {"role": "assistant", "content": "hi"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "book", "arguments": {"seats": 2}}}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books seats.",
        "parameters": {"type": "object", "required": ["seats"], "properties": {"seats": {"type": "integer"}}},
    },
}


def render(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return ChatTemplate(translate(source)).render(messages, **more)


ONE_TURN = """{{ if .System }}<|system|>
{{ .System }}<|end|>
{{ end }}{{ if .Prompt }}<|user|>
{{ .Prompt }}<|end|>
{{ end }}<|assistant|>
{{ .Response }}<|end|>
"""


def test_a_template_of_one_turn_is_repeated_over_a_conversation() -> None:
    system, question, user = (
        "<|system|>\nBe brief.<|end|>\n",
        f"<|user|>\n{USER['content']}<|end|>\n",
        "<|assistant|>\n",
    )
    assert render(ONE_TURN, [USER]) == question + user
    assert render(ONE_TURN, [SYSTEM, USER]) == system + question + user
    assert render(ONE_TURN, [SYSTEM, USER, ANSWER, USER]) == f"{system}{question}{user}hi<|end|>\n{question}{user}"
    later = [USER, ANSWER, SYSTEM, USER]
    assert render(ONE_TURN, later) == f"{question}{user}hi<|end|>\n{system}{question}{user}"


def test_without_a_response_the_answer_comes_last() -> None:
    assert render("[INST] {{ .System }} {{ .Prompt }} [/INST]", [SYSTEM, ANSWER | {"role": "user"}]) == (
        "[INST] Be brief. hi [/INST]"
    )


MESSAGES = """{{- if or .System .Tools }}<s>
{{- if .System }}
{{ .System }}
{{- end }}
{{- if .Tools }}
{{- range .Tools }}
{"type": "function", "function": {{ .Function }}}
{{- end }}
{{- end }}</s>
{{ end }}
{{- /* turns */ -}}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "user" }}<u>{{ .Content }}</u>
{{ else if eq .Role "assistant" }}<a>
{{ if .Content }}{{ .Content }}
{{- else if .ToolCalls }}
{{- range .ToolCalls }}{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}
{{- end }}
{{- end }}{{ if not $last }}</a>
{{ end }}
{{- else if eq .Role "tool" }}<t>{{ .Content }}</t>
{{ end }}
{{- if and (ne .Role "assistant") $last }}<a>
{{ end }}
{{- end }}"""


def test_messages_tools_and_calls() -> None:
    result = {"role": "tool", "content": "done", "name": "book"}
    told = (
        '<s>\nBe brief.\n{"type": "function", "function": {"name":"book","description":"Books seats.","parameters":'
        '{"type":"object","required":["seats"],"properties":{"seats":{"type":"integer"}}}}}</s>\n'
    )
    text = render(MESSAGES, [SYSTEM, USER, CALLS, result], tools=[TOOL])
    assert text == (
        f'{told}<u>{USER["content"]}</u>\n<a>\n{{"name": "book", "arguments": {{"seats":2}}}}</a>\n<t>done</t>\n<a>\n'
    )
    assert render(MESSAGES, [USER]) == f"<u>{USER['content']}</u>\n<a>\n"
    assert render(MESSAGES, [USER, ANSWER, USER | {"content": "b"}]) == (
        f"<u>{USER['content']}</u>\n<a>\nhi</a>\n<u>b</u>\n<a>\n"
    )


VARIABLES = """{{- $seen := -1 -}}
{{- range $i, $m := .Messages }}{{ if eq $m.Role "user" }}{{ $seen = $i }}{{ end }}{{ end -}}
{{- range $i, $m := .Messages }}
{{- if eq $m.Role "system" }}{{ continue }}{{ end }}
{{- if and (eq $i $seen) (gt (len $.Messages) 1) }}*{{ end }}{{ $m.Role | print }}:{{ json $m.Content }};
{{- end }}
{{- with (index .Messages 0).Content }}[{{ . }}]{{ end }}
{{- range .Tools }}
{{- range $name, $property := .Function.Parameters.Properties }}<{{ $name }}={{ $property.Type }}>{{ end }}
{{- else }}none{{ end }}"""


def test_variables_pipes_with_and_maps() -> None:
    turns = [SYSTEM, ANSWER, ANSWER | {"role": "user"}]
    assert render(VARIABLES, turns) == 'assistant:"hi";*user:"hi";[Be brief.]none'
    assert render(VARIABLES, turns, tools=[TOOL]).endswith("[Be brief.]<seats=integer>")


def test_thinking_can_be_asked_for() -> None:
    source = (
        "{{ range .Messages }}{{ .Content }}{{ end }}"
        "{{ if and .IsThinkSet (not .Think) }}/no{{ else if .Think }}/yes{{ end }}"
    )
    assert [render(source, [ANSWER | {"role": "user"}], **kwargs) for kwargs in ({}, {"enable_thinking": False})] == [
        "hi", "hi/no",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ template \"x\" . }}{{ .Prompt }}", "template"),
        ("{{ printf \"%d\" 5 }}{{ .Prompt }}", "printf"),
        ("{{ range .Messages }}{{ toTypeScriptType .Content }}{{ end }}", "toTypeScriptType"),
        ("{{ .Prompt }}{{ .Odd }}", r"\.Odd"),
        ("{{ range .Messages }}{{ . }}{{ end }}", "whole message"),
        ("{{ range .Messages }}{{ .Role.Name }}{{ end }}", r"\.Name of a text"),
        ("{{ if .Prompt }}", "without its"),
        ("{{ .Prompt }}{{ end }}", "without a block"),
        ("{{ .Prompt", "cannot be read"),
        ("{{ (eq .Prompt }}", "not closed"),
        ("{{ $x }}{{ .Prompt }}", r"\$x"),
        ("{{ $x = 1 }}{{ .Prompt }}", r"\$x"),
        ("no chat at all", "neither"),
        ("{{ if .Prompt }}" * 60 + "{{ end }}" * 60, "inside each other"),
        ("{{ " + "(" * 60 + ".Prompt" + ")" * 60 + " }}", "inside each other"),
        ("{{ ) }}{{ .Prompt }}", "cannot be read"),
        ("{{ | }}{{ .Prompt }}", "cannot be read"),
    ],
)  # fmt: skip
def test_what_has_no_translation_is_refused_by_name(source: str, told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        translate(source)


def test_jinja_stays_and_turns_come_before_it() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    turns = [{"role": "user", "content": "{%- x %}"}, {"role": "assistant", "content": "🙂"}]
    made = ChatTemplate(conversation_template(source, "", "S", turns))
    question = {"role": "user", "content": "q"}
    assert made.render([question]) == "system:S;user:{%- x %};assistant:🙂;user:q;"
    assert made.render([SYSTEM, question]) == "system:Be brief.;user:{%- x %};assistant:🙂;user:q;"
