"""Translations of grammars: what the matchers then accept, and what is refused and why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.text.grammar.lark import sequence
from penstock.text.grammar.plain import plain_schema
from penstock.text.grammar.translate import translate

BYTES = LLTokenizer("byte")


def matches(kind: str, source: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, translate(kind, source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


ARITHMETIC = r"""
# a comment
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t]*
"""


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ('root ::= "a" | "b"', ["a", "b"], ["", "ab", "c"]),
        ("root ::= 'x' [0-9]{2,3}", ["x12", "x123"], ["x1", "x1234"]),
        ('root ::= ("a" | "b")* "c"?', ["", "abba", "bc"], ["cc", "ca"]),
        (r'root ::= [^"\\\]a-c-]+', ["def ", "Ü"], ['"', "a", "-", "\\", "]"]),
        (r'root ::= "\x41\u00e9\U0001F388" [\x30-\x32]', ["Aé🎈0"], ["Aé🎈3"]),
        ('root ::= .{3}', ["abc", "a\nb"], ["ab"]),
        ('root ::= "" | "a/b" [/]', ["", "a/b/"], ["a/b"]),
        ('root ::= [a-z]+ "x"', ["ax", "xx"], ["x", "ab"]),  # a rule's lexemes would take the x
        ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "())"]),
        ('root ::= list\nlist ::= item ("," list)?\nitem ::= [a-z]+ | "[" list "]"', ["a,b,[c,[d]]"], ["a,", "[]"]),
        (ARITHMETIC, ["x= 1\n", "(a+b)*2= c\n1= 2\n"], ["x=\n", "x+= 1\n"]),
        ("root ::=\n  a |\n  b\na ::= 'a'\nb ::= 'b'", ["a", "b"], ["ab"]),
        ("root ::= []", [], ["", "a"]),
    ],
)  # fmt: skip
def test_gbnf_means_what_llama_cpp_means(source: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert matches("gbnf", source, text), text
    for text in wrong:
        assert not matches("gbnf", source, text), text


def test_control_tokens_of_gbnf_are_passed_on() -> None:
    assert "<[5]>" in translate("gbnf", 'root ::= <[5]> "a"')
    assert "<|tool|>" in translate("gbnf", 'root ::= ("a" <|tool|>)+')
    assert "<[^7]>" in translate("gbnf", "root ::= !<[7]>")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('start ::= "a"', "no rule named root"),
        ("root ::= other", "uses the rule other in root"),
        ('root ::= "a"\nroot ::= "b"', 'line 2, at "root ::=": the rule root is defined twice'),
        ('root ::= ("a"', "this bracket is not closed"),
        ('root ::= "a" )', "expected a rule"),
        ('root ::= * "a"', "nothing stands before it"),
        ("root ::= $", "this is not part of GBNF"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested deeper than 64"),
        ('root ::= "\\Uffffffff"', "which is no character"),
        ("root ::= !<think>", "written by its number"),
        ("root ::= 'a'\n" + "\n".join(f"r{i} ::= 'a'" for i in range(3000)), "more than the 2000 rules"),
        ("", "no rule named root"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_place(source: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        translate("gbnf", source)
    assert says in str(refused.value)
    assert refused.value.param == "grammar"


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("regex", "a" * 5000, "4096"),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", 1]', "at least one string"),
        ("choice", "a", "no list of strings"),
        ("choice", json.dumps([str(i) for i in range(10_001)]), "10000"),
        ("lark", "  ", "empty"),
        ("lark", "start: " + "(" * 100 + '"a"' + ")" * 100, "64 levels"),
        ("lark", f"start: /{'(' * 200}a{')' * 200}/", "64 levels"),
        ("lark", "start: r0\n" + "\n".join(f'r{i}: "a"' for i in range(2500)), "2000 rules"),
        ("lark", "start: T\nT: " + " & ".join(["/a/"] * 10), "operators &"),
        ("lark", 'start: %json {"allOf": ', "no JSON"),
        ("lark", '{"a": 1}', "without a list of grammars"),
        ("json_schema", "3", "an object"),
        ("json_schema", "{", "no JSON schema"),
        ("json_schema", json.dumps({"a": "x" * 2**20}), "1048576"),
        ("json_schema", '{"items":' * 100 + "{}" + "}" * 100, "64 levels"),
        ("json_schema", "[" * 50_000, "nested too deeply"),
        ("json_schema", json.dumps({"allOf": [{"pattern": str(i)} for i in range(9)]}), "allOf joins 9 patterns"),
        ("json_schema", json.dumps({"minProperties": 3, "required": ["a"]}), "minProperties is 3"),
        ("json_schema", '{"a": "\\u0000"}'.replace("\\u0000", "\0"), "NUL"),
        ("structural_tag", "[]", "an object"),
        ("structural_tag", "{}", "structures"),
        ("structural_tag", '{"format": {"type": "poem"}}', "allowed: const_string"),
        ("structural_tag", '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}', "triggers"),
    ],
)
def test_what_is_wrong_is_named(kind: str, source: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        translate(kind, source)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 400


def test_schemas_that_refer_to_themselves_many_times_are_judged_quickly() -> None:
    chain = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 4} for i in range(20)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a20": {"type": "string", "pattern": "a"}}}
    began = time.process_time()
    with pytest.raises(RequestError, match="joins"):
        translate("json_schema", json.dumps(schema))
    assert time.process_time() - began < 30  # looked at one by one, their 4 ** 20 places would take days


def test_many_patterns_at_different_places_are_fine() -> None:
    schema = {"properties": {f"p{i}": {"type": "string", "pattern": "^a$"} for i in range(40)}}
    translate("json_schema", json.dumps({"allOf": [schema, {"properties": {"q": {"pattern": "b"}}}]}))


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"minLength": 2.0, "maxItems": 3.5}, {"minLength": 2, "maxItems": 3.5}),
        ({"if": {}, "minContains": 2}, {}),
        ({"if": {}, "then": {"type": "null"}}, {"allOf": [{"type": "null"}]}),
        ({"if": {"type": "null"}, "else": False}, {"allOf": [{"type": "null"}]}),
        (
            {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}},
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"allOf": [{"type": "string"}, {"minLength": 2}]},
                            {"allOf": [{"type": ["array", "boolean", "null", "number", "object"]}, {"type": "null"}]},
                        ]
                    }
                ]
            },
        ),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 1}}, {"if": {"pattern": "a"}, "then": {"maxLength": 1}}),
        ({"format": "int32", "type": "integer"}, {"type": "integer"}),
        ({"format": "email"}, {"format": "email"}),
        ({"unevaluatedProperties": False}, {"additionalProperties": False}),
        ({"unevaluatedItems": {"type": "null"}, "items": True}, {"items": True}),
        ({"unevaluatedProperties": False, "allOf": [{}]}, {"unevaluatedProperties": False, "allOf": [{}]}),
        ({"enum": [{"format": "x", "minLength": 1.0}]}, {"enum": [{"format": "x", "minLength": 1.0}]}),
        ({"properties": {"format": {"format": "x"}}}, {"properties": {"format": {}}}),
        ({"exclusiveMinimum": 3, "type": "integer"}, {"exclusiveMinimum": 3, "type": "integer"}),
        ({"components": {"x": {"format": "money"}}}, {"components": {"x": {}}}),
        ({"format": "idn-email"}, {"format": "email"}),
        ({"uniqueItems": False}, {}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"not": {"type": ["object", "array", "string"]}}, {"allOf": [{"type": ["boolean", "null", "number"]}]}),
        (
            {"not": {"not": {"minimum": 3}}},
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"type": ["array", "boolean", "null", "object", "string"]},
                            {"type": "number", "minimum": 3},
                        ]
                    }
                ]
            },
        ),
        ({"not": {"type": "integer"}}, {"not": {"type": "integer"}}),
        ({"not": {"minimum": 3}}, {"allOf": [{"type": "number", "exclusiveMaximum": 2.999999}]}),
        ({"not": {"multipleOf": 3}}, {"not": {"multipleOf": 3}}),
        ({"enum": [1, 2, "a"], "not": {"enum": [2.0, "b"]}}, {"enum": [1, 2, "a"], "allOf": [{"enum": [1, "a"]}]}),
        ({"not": {"required": ["a"]}}, {"allOf": [{"type": "object", "properties": {"a": False}}]}),
        (
            {"dependentRequired": {"a": ["b"], "c": []}},
            {"allOf": [{"anyOf": [{"properties": {"a": False}}, {"properties": {"a": True}, "required": ["b"]}]}]},
        ),
        ({"dependencies": {str(i): ["b"] for i in range(9)}}, {"dependencies": {str(i): ["b"] for i in range(9)}}),
    ],
)
def test_plain_schemas_mean_the_same(schema: Any, plain: Any) -> None:
    assert plain_schema(schema) == plain


@pytest.mark.parametrize("low", [-3, -1.5, -1, -0.5, 0, 0.5, 1, 1.5])
@pytest.mark.parametrize("high", [-2, -1, -0.75, 0, 0.25, 1, 1.75])
def test_bounds_keep_numbers_within_them(low: float, high: float) -> None:
    """Also where a library's ranges would let an exclusive bound through."""
    values = [f"{bound + step:.3g}" for bound in (low, high) for step in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
    for schema in ({"exclusiveMinimum": low, "maximum": high}, {"minimum": low, "exclusiveMaximum": high}):
        if low >= high:
            continue
        for value in values:
            number = float(value)
            above = number > low if "exclusiveMinimum" in schema else number >= low
            below = number < high if "exclusiveMaximum" in schema else number <= high
            if matches("json_schema", json.dumps({"type": "number", **schema}), value):
                assert above, value
                assert below, value


CALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OLDER = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=a>", "schema": CALL, "end": "</f>"}, {"begin": "<f=b>", "schema": {}, "end": "</f>"}],
}


def tag(node: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": node})


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        (json.dumps(OLDER), ["", "free", 'well <f=a>{"x":1}</f> and <f=b>[]</f>.'], ["<f=c>", '<f=a>{"y":1}</f>']),
        (tag({"type": "const_string", "value": "a b"}), ["a b"], ["a", ""]),
        (tag({"type": "regex", "pattern": "[a-c]/?"}), ["a", "b/"], ["d"]),
        (tag({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}), ["((x))"], ["(x"]),
        (tag({"type": "any_text"}), ["", "any\nthing"], []),
        (
            tag({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "json_schema",
                 "json_schema": CALL}]}),
            ['a{"x":2}'],
            ['{"x":2}'],
        ),
        (
            tag({"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("yes", "no")]}),
            ["yes", "no"],
            ["maybe"],
        ),
        (
            tag({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}),
            ["<t>text</t>"],
            ["<t>text", "<t>a</t>b"],
        ),
        (
            tag({"type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True,
                 "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": CALL}, "end": "</a>"}]}),
            ['so <a>{"x":1}</a>'],
            ["so", '<a>{"x":1}</a> more'],
        ),
        (
            tag({"type": "tags_with_separator", "separator": ",", "at_least_one": True,
                 "tags": [{"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "."}, "end": "]"}]}),
            ["[1]", "[1],[2]"],
            ["", "[1][2]", "[1],"],
        ),
    ],
)  # fmt: skip
def test_structural_tags(source: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert matches("structural_tag", source, text), text
    for text in wrong:
        assert not matches("structural_tag", source, text), text


def test_control_tokens_in_texts_are_tokens() -> None:
    special = {"<call>": 7, "<call>x": 9}
    assert sequence('a<call>"b', special) == '"a" <[7]> "\\"b"'
    assert sequence("<call>xy", special) == '<[9]> "y"'
    assert sequence("", special) == ""
    text = translate("structural_tag", json.dumps(OLDER | {"triggers": ["<f=a>", "<f=b>"]}), {"<f=a>": 3})
    assert "<[3]>" in text
    assert '"<f=b>"' in text


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("gbnf", lambda count: "root ::= " + " | ".join(f'"a{i}"' for i in range(count // 2))),
        (
            "json_schema",
            lambda count: json.dumps({"properties": {f"a{i}": {"type": "null"} for i in range(count // 2)}}),
        ),
    ],
)
def test_grammars_of_more_parts_than_are_read_in_a_moment_are_refused(kind: str, write: Callable[[int], str]) -> None:
    translate(kind, write(limits.MAX_GRAMMAR_PARTS - 100))
    with pytest.raises(RequestError, match=f"more than the {limits.MAX_GRAMMAR_PARTS}"):
        translate(kind, write(limits.MAX_GRAMMAR_PARTS + 100))


A: dict[str, Any] = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
B: dict[str, Any] = {"properties": {"kind": {"enum": ["b", "c"]}, "a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ([{"type": "string"}, {"type": ["null", "integer"]}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
        ([{"$ref": "#/$defs/a", "type": "null"}, {"$ref": "#/$defs/a"}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"const": True}, {"enum": [2, "1"]}], True),
        ([{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}], False),
        ([{"required": ["x"]}, {"required": ["y"]}], False),
        ([{**A, "additionalProperties": False}, {"type": "object", "required": ["x"]}], True),
        ([{**A, "additionalProperties": False, "patternProperties": {"^x": {}}}, {"required": ["x"]}], False),
        ([{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}], True),
        ([{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}], False),
        ([{"type": "number", "minimum": 5}, {"type": "integer", "maximum": 4}], True),
        ([{"minimum": 5}, {"maximum": 4}], False),  # a text fits both
        ([{"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "boolean"}], True),
        ([{"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "string"}], False),
        ([{"pattern": "a", "type": "string"}, {"pattern": "b", "type": "string"}], False),
        ([{"$ref": "#/$defs/loop"}, {"type": "null"}], False),
        ([{"$ref": "other.json"}, {"type": "null"}], False),
        ([True, False], True),
        ([{"type": "array", "items": {"type": "null"}}, {"type": "array", "items": {"type": "string"}}], False),
    ],
)
def test_options_that_exclude_each_other_are_alternatives(options: list[Any], apart: bool) -> None:
    schema = {"oneOf": options, "$defs": {"a": A, "b": {**B, "type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert ("anyOf" in plain_schema(schema)) is apart


def test_many_options_are_compared_within_a_number_of_steps() -> None:
    options = [{"properties": {"a": {"const": str(i)}}, "required": ["a"]} for i in range(3000)]
    assert "oneOf" in plain_schema({"oneOf": options})
    assert "anyOf" in plain_schema({"oneOf": [{"const": i} for i in range(3000)]})
    assert "anyOf" in plain_schema({"oneOf": options[:20], "type": "object"})
    assert "oneOf" in plain_schema({"oneOf": options[:20]}), "a text fits all"


def test_many_denied_values_become_one_list() -> None:
    values = {"enum": [1, 2, 3.0, "a"]}
    anything = {"not": {"anyOf": [{"const": 1}, {"enum": [3, 4]}]}}
    assert plain_schema(values | anything) == values | {"allOf": [{"enum": [2, "a"]}]}
    not_all = {"not": {"allOf": [{"enum": [1, 2]}, {"enum": [2, 3]}, {"type": "string"}]}}
    kinds = ["array", "boolean", "null", "number", "object"]
    left = [{"type": kinds}, {"enum": [1, 3.0, "a"]}]
    assert plain_schema(values | not_all) == values | {"allOf": [{"anyOf": left}]}
    schema = json.dumps({"enum": list(range(9000)), "not": {"anyOf": [{"const": i} for i in range(2000)]}})
    assert len(translate("json_schema", schema)) < 2 * len(schema)


def test_values_are_compared_and_written_within_a_number_of_steps() -> None:
    values = {"enum": [f"v{i}" for i in range(500)]}
    options = [{"allOf": [{"$ref": "#/$defs/a"}, {"enum": [f"v{i}"]}]} for i in range(20)]
    assert "anyOf" in plain_schema({"oneOf": options, "$defs": {"a": values}})
    lists = [{"properties": {"a": {"enum": [i, *range(1000, 5000)]}}, "required": ["a"]} for i in range(6)]
    lists[1]["properties"]["a"] = values
    assert "oneOf" in plain_schema({"oneOf": lists})
    denied = [{"allOf": [{"type": "string"}, {"const": str(i)}]} for i in range(3000)]
    assert "not" not in plain_schema({**values, "not": {"anyOf": denied[:20]}})
    assert "not" in plain_schema({"enum": ["x" * 1000], "not": {"anyOf": denied}})
    with pytest.raises(RequestError, match=r"has 506505 values .* at most 131072. Write one enum"):
        translate("json_schema", json.dumps({"enum": list(range(1000)), "not": {"anyOf": denied[:500]}}))


def test_several_options_may_fit_if_a_client_says_so() -> None:
    asked = json.dumps({"oneOf": [{"minLength": 1}, {"maxLength": 3}], "x-guidance": {"coerce_one_of": True}})
    assert matches("json_schema", asked, '"ab"')


def test_a_schema_whose_references_join_without_end_is_refused_within_a_number_of_steps() -> None:
    big = {"properties": {f"q{i}": {"type": "string", "pattern": "a"} for i in range(1500)}}
    schema = {"$defs": {"big": big}, "properties": {f"p{i}": {"allOf": [{"$ref": "#/$defs/big"}]} for i in range(1500)}}
    with pytest.raises(RequestError, match="joins too many schemas"):
        translate("json_schema", json.dumps(schema))
