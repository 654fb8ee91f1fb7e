"""Reasoning and calls are read back from what every format writes, however it is cut, and from what breaks it."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from typing import Any

import pytest

from penstock.config.errors import ParameterError
from penstock.text.parsers.calls import CallMarks
from penstock.text.parsers.events import call_id
from penstock.text.parsers.format import CallIds, choose, formats, names
from penstock.text.parsers.parser import AnswerParser
from tests.text.answers import ARGUMENTS, SCHEMAS, Read, cut, read, whole, written

CALLING = [name for name, entry in formats().items() if entry.calls]
REASONING = [name for name, entry in formats().items() if entry.reasoning]
ASKED = (
    *("hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_pythonic", "mistral", "deepseek_v3", "deepseek_v31"),
    *("deepseek_v32", "kimi_k2", "glm4_moe", "glm45", "openai", "granite", "phi4mini", "minimax_m2", "olmo3", "cohere"),
    *("command_r", "functiongemma", "gemma4", "ernie45", "seed_oss", "step3", "internlm", "jamba", "xlam"),
)
ASKED_REASONING = (
    *("deepseek_r1", "qwen3", "openai_gptoss", "granite", "mistral", "gemma4", "glm45", "kimi_k2", "minimax_m2"),
    *("nemotron_v3", "ernie45", "hunyuan_a13b", "seed_oss", "step3"),
)


def answers(name: str) -> list[tuple[str, str, int, str]]:
    """(reasoning, text, number of calls, how that is written) of many answers in a format."""
    entry = formats()[name]
    found = []
    for reasoning in ("", "Think, then.\nAnd again.")[: 2 if entry.reasoning else 1]:
        if not reasoning and entry.reasoning and entry.reasoning.assumed:
            continue
        for text in ("", "Let me look."):
            for calls in range(4 if entry.calls else 1):
                if not (text and calls and entry.calls and entry.calls.bare):  # which begins an answer
                    found.append((reasoning, text, calls, written(name, reasoning, text, calls)))
    return found


def test_the_fields_names_are_known() -> None:
    assert set(ASKED) <= set(names("tool_names"))
    assert set(ASKED_REASONING) <= set(names("reasoning_names"))
    for name in names("tool_names"):
        assert choose("", name).calls is not None
    for name in names("reasoning_names"):
        assert choose("", None, name).reasoning is not None


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(ParameterError, match=r'"hermit"; allowed: none, .*hermes, .*qwen3_coder'):
        choose("", "hermit")
    with pytest.raises(ParameterError, match=r'reasoning-parser is "r3"; allowed: none, .*deepseek_r1'):
        choose("", None, "r3")
    assert choose("<tool_call></think>", "none", "none") == choose("")


@pytest.mark.parametrize("name", formats())
def test_what_a_format_writes_is_read_back(name: str) -> None:
    for reasoning, text, calls, answer in answers(name):
        found = read(whole(name), [answer])
        assert (found.reasoning, found.text) == (reasoning, text)
        assert found.names == ["get_weather"] * calls
        assert found.arguments == ARGUMENTS[:calls]


def test_random_cuts_change_nothing() -> None:
    """Each answer cut thrice at random, over all formats and what breaks them."""
    chances = random.Random(5)
    cases = [(name, answer) for name in formats() for *_, answer in answers(name)]
    cases += [(name, broken(answer, chances)) for name, answer in cases for _ in range(2)]
    expected: dict[tuple[str, str], Read] = {}
    for name, answer in 3 * cases:
        if (name, answer) not in expected:
            expected[name, answer] = read(whole(name), [answer])
        assert read(whole(name), cut(answer, chances)) == expected[name, answer], (name, answer)


def test_bytes_cut_within_characters_change_nothing() -> None:
    """As tokens come: of bytes, of which some are no whole character."""
    import codecs

    chances = random.Random(6)
    for name in CALLING:
        data = written(name, "", "", 1).encode()
        decoder = codecs.getincrementaldecoder("utf-8")()
        places = sorted(chances.sample(range(1, len(data)), 9))
        bounds = zip([0, *places], [*places, len(data)], strict=True)
        pieces = [decoder.decode(data[first:last]) for first, last in bounds]
        assert read(whole(name), pieces, opened=None).arguments == ARGUMENTS[:1]


def broken(answer: str, chances: random.Random) -> str:
    """An answer with parts lost, doubled, moved or cut off."""
    for _ in range(chances.randint(1, 3)):
        first, last = sorted(chances.randrange(len(answer) + 1) for _ in range(2))
        part = answer[first:last]
        answer = chances.choice(
            (
                answer[:last],
                answer[:first] + answer[last:],
                answer[:last] + part + answer[last:],
                answer[:first]
                + chances.choice(('"', "{", "}", "</", "<tool_call>", "\\", "]", "\x00", "\u2028"))
                + answer[first:],
            )
        )
    return answer


@pytest.mark.parametrize("name", formats())
def test_what_is_broken_gives_valid_arguments(name: str) -> None:
    chances = random.Random(name)
    for *_, answer in answers(name):
        for _ in range(12):
            found = read(whole(name), [broken(answer, chances)], opened=None)
            assert all(isinstance(arguments, dict) for arguments in found.arguments)
            assert all(call[1] for call in found.calls)


@pytest.mark.parametrize("name", CALLING)
def test_an_answer_may_end_anywhere(name: str) -> None:
    answer = written(name, "", "", 2)
    for size in range(len(answer)):
        found = read(whole(name), [answer[:size]], opened=None)
        assert all(isinstance(arguments, dict) for arguments in found.arguments)


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("must", [False, True], ids=["may", "must"])
def test_of_an_answer_that_was_cut_calls_are_told_as_far_as_they_came(name: str, must: bool) -> None:
    format = whole(name)
    assert format.calls is not None
    marks = CallMarks(format.calls).opening
    answer = written(name, "", "", 2)
    every = read(format, [answer], opened=None).calls
    partial = 0
    for size in range(1, len(answer)):
        begun = answer[:size]
        for pieces in ([begun], list(begun)):
            found = read(format, pieces, opened=None, short=True, must=must)
            for (key, called, arguments), told in zip(found.calls, every, strict=False):
                assert (key, called) == told[:2]
                assert told[2].startswith(arguments), (begun, arguments)
            partial += found.calls != every[: len(found.calls)]
            likely = format.channels is not None or any(mark.startswith(begun.strip()) for mark in marks)
            assert not found.text.strip() or likely or (format.calls.bare and not must), (begun, found.text)
    assert partial


@pytest.mark.parametrize("name", CALLING)
def test_marks_are_never_shown_before_they_are_whole(name: str) -> None:
    """No piece of a mark is told as text, one character at a time."""
    answer = written(name, "", "", 1)
    found = read(whole(name), list(answer), opened=None)
    assert found.text == ""
    assert found.arguments == ARGUMENTS[:1]


HOSTILE = {
    "an endless begin": lambda mark: mark * (300_000 // max(len(mark), 1)),
    "a name that never ends": lambda mark: mark + '{"name": "' + "a" * 300_000,
    "arguments that never end": lambda mark: mark + '{"name": "get_weather", "arguments": {"a": "' + "b" * 300_000,
    "brackets": lambda mark: mark + '{"name": "get_weather", "arguments": ' + '{"a":' * 60_000,
    "arguments before a name": lambda mark: mark + '{"arguments": "' + "\\u00e9" * 50_000,
    "numbers": lambda mark: mark + '{"name": "get_weather", "arguments": {"a": ' + "1" * 300_000,
    "spaces": lambda mark: mark + " " * 300_000,
    "half marks": lambda mark: mark[:-1] * (300_000 // max(len(mark) - 1, 1)),
    "escapes": lambda mark: mark + '{"name": "get_weather", "arguments": {"a": "' + "\\" * 300_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_much_hostility_takes_linear_time_and_little_memory(kind: str) -> None:
    for name in ("hermes", "llama3_json", "qwen3_coder", "glm45", "harmony", "deepseek_v3"):
        format = whole(name)
        calls = format.calls
        assert calls is not None
        mark = calls.begin.strip() or calls.call.split("{")[0].strip()
        answer = HOSTILE[kind](mark)
        parser = AnswerParser(format, tools=SCHEMAS)
        began = time.process_time()
        told = 0
        for place in range(0, len(answer), 64):
            for news in parser.push(answer[place : place + 64]):
                told += len(news.text) + len(news.reasoning) + sum(len(call.arguments) for call in news.tool_calls)
        parser.finish()
        assert time.process_time() - began < 30
        held = len(parser._stream.text) + sum(map(len, parser._stream.log or ()))
        assert held < 40_000


def test_memory_does_not_grow_with_an_answer() -> None:
    parser = AnswerParser(whole("hermes"), tools=SCHEMAS)
    parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "')
    tracemalloc.start()
    for _ in range(20_000):
        parser.push("some more of the same city ")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize(
    ("answer", "text", "reasoning", "calls"),
    [
        ("plain text", "plain text", "", []),
        ("  plain text \n", "  plain text \n", "", []),
        ("<think>a</think>b", "b", "a", []),
        ("\n<think>\n\na\n\n</think>\n\nb ", "b ", "a", []),
        ("<think>cut o", "", "cut o", []),
        ("a <think>b</think>", "a <think>b</think>", "", []),  # reasoning comes first or not at all
        ("a </tool_call> b", "a </tool_call> b", "", []),
        ("<tool_call> is a tag", "<tool_call> is a tag", "", []),
        ('<tool_call>{"nam": "f"}</tool_call>', '<tool_call>{"nam": "f"}</tool_call>', "", []),
        ('<tool_call>{"name": "f"}</tool_call>', "", "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("f", {"a": 1})]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", "", [("f", {"a": 1})]),
        ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', "", "", [("f", {"a": 1})]),
        ("<tool_call>{'name': 'f', 'arguments': {'a': True,}}</tool_call>", "", "", [("f", {"a": True})]),
        ('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", "", [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "", "", [("f", {"a": "</tool_call>"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, b c}}</tool_call> on', "on", "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, "tw', "", "", [("f", {"a": [1, "tw"]})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": tru', "", "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\ud83d\\ude00\\q"}}', "", "", [("f", {"a": "é😀\\q"})]),
        ('a <tool_call>{"name": "f"}</tool_call> b', "a b", "", [("f", {})]),
        ('<think>x <tool_call>{"name": "f"}</tool_call></think>', "", 'x <tool_call>{"name": "f"}</tool_call>', []),
    ],
)  # fmt: skip
def test_hermes(answer: str, text: str, reasoning: str, calls: list[Any]) -> None:
    format = choose("<tool_call></think>")
    for pieces in ([answer], list(answer)):
        found = read(format, pieces)
        assert (found.text, found.reasoning) == (text, reasoning)
        assert list(zip(found.names, found.arguments, strict=True)) == calls


def test_parameters_take_the_types_of_the_schema() -> None:
    properties = {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "of": {"enum": [1, 2]},
        "ref": {"$ref": "#/$defs/flag"},
    }
    tools = {"f": {"properties": properties, "$defs": {"flag": {"type": "boolean"}}}}
    values = {
        "text": "12",
        "whole": "12",
        "either": "null",
        "of": "2",
        "ref": "True",
        "unknown": "1.5",
        "word": "one two",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    found = read(whole("qwen3_coder"), [f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"], tools)
    assert found.arguments == [
        {"text": "12", "whole": 12, "either": None, "of": 2, "ref": True, "unknown": 1.5, "word": "one two"}
    ]
    odd = read(
        whole("qwen3_coder"),
        ["<function=f><parameter=whole>a few</parameter><parameter=text>\n\n x \n\n</parameter></function>"],
        tools,
    )
    assert odd.arguments == [{"whole": "a few", "text": "\n x \n"}]


def test_python_calls() -> None:
    tools = {"f": {"properties": {"a": {}, "b": {}}}, "g": {}}
    found = read(whole("llama4_pythonic"), ["[f(a=1, b=['x', True]), g(), f('it\\'s', b=(1, {'k': None}))]"], tools)
    assert found.names == ["f", "g", "f"]
    assert found.arguments == [{"a": 1, "b": ["x", True]}, {}, {"a": "it's", "b": [1, {"k": None}]}]
    for text in ("[1] shows", "[h(a=1)]", "[f] is", "f(a=1)"):
        assert read(whole("llama4_pythonic"), list(text), tools).text == text


def test_calls_without_marks_name_a_function_there_is() -> None:
    for text in ('{"answer": 5}', '{"name": "Rome"}', '{"name": "Rome", "parameters": {}}', "{curly", '{"type": "x"}'):
        found = read(whole("llama3_json"), list(text))
        assert (found.text, found.calls) == (text, ())
    answer = '{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "get_weather", "parameters": {}}'
    assert read(whole("llama3_json"), [answer]).arguments == [{"city": "Rome"}, {}]


def test_messages_of_channels() -> None:
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Sunny."
    )
    for pieces in ([answer], list(answer)):
        found = read(whole("harmony"), pieces)
        assert (found.reasoning, found.text) == ("Hm.\nSo.", "I will look.\nSunny.")
        assert (found.names, found.arguments) == (["get_weather"], [{"city": "Rome"}])
    assert read(whole("harmony"), ["no head at all"]).text == "no head at all"


def test_reasoning_the_prompt_has_opened_or_closed() -> None:
    format = choose("</think>")
    assert read(format, ["a</think>b"], opened=True) == Read("b", "a", ())
    assert read(format, ["<think>a</think>b"], opened=True) == Read("b", "a", ())
    assert read(format, ["never ends"], opened=True) == Read("", "never ends", ())
    assumed = choose("", None, "deepseek_r1")
    assert read(assumed, ["a</think>b"]) == Read("b", "a", ())
    assert read(assumed, ["b"], opened=None) == Read("b", "", ())


def test_a_call_may_end_the_reasoning_of_models_that_forget_to() -> None:
    answer = (
        "a <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    found = read(whole("kimi_k2"), [answer], opened=True)
    assert (found.reasoning, found.names) == ("a", ["f"])
    for pieces in ([answer], list(answer)):
        found = read(whole("kimi_k2"), ["So <|tool_calls_section_begin|> it is: ", *pieces, " on"], opened=True)
        assert found.reasoning == "So <|tool_calls_section_begin|> it is: a"
        assert (found.names, found.text) == (["f"], "on")
    assert read(whole("kimi_k2"), ["no <|tool_calls_section_begin|> call"], opened=True).text == ""


def test_without_functions_nothing_is_a_call() -> None:
    answer = written("hermes", "", "", 1)
    assert read(whole("hermes"), [answer], None).text == answer


def test_control_tokens_that_mark_nothing_are_left_out() -> None:
    answer = "a</tool_call> b" + written("hermes", "", "", 1) + "</tool_call>"
    found = read(whole("hermes"), list(answer), hidden=frozenset(("<tool_call>", "</tool_call>")))
    assert (found.text, found.arguments) == ("a b", ARGUMENTS[:1])


def test_only_one_call_where_more_are_not_wanted() -> None:
    assert read(whole("hermes"), [written("hermes", "", "", 3)], single=True).arguments == ARGUMENTS[:1]


def test_ids_are_made_by_rule_from_key_and_index() -> None:
    assert call_id(CallIds.CALL, "k", 0, "f") == call_id(CallIds.CALL, "k", 0, "f")
    assert len({call_id(kind, key, index, "f") for kind in CallIds for key in "ab" for index in (0, 1)}) == 10
    assert call_id(CallIds.CALL, "k", 0, "f").startswith("call_")
    mistral = call_id(CallIds.MISTRAL, "k", 0, "f")
    assert len(mistral) == 9
    assert mistral.isalnum()
    assert call_id(CallIds.KIMI, "k", 1, "f", earlier=2) == "functions.f:3"


@pytest.mark.parametrize("name", formats())
def test_every_format_says_whose_it_is(name: str) -> None:
    entry = formats()[name]
    assert entry.about
    assert bool(entry.tool_names) == (entry.calls is not None)
    assert bool(entry.reasoning_names) == (entry.reasoning is not None)
    assert json.dumps(entry.about)
