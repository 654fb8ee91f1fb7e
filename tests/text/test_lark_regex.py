"""Lark grammars as regular expressions: what they match, and what is refused."""

from __future__ import annotations

import re

import pytest

from penstock.config import limits
from penstock.text.grammar.lark_regex import COMMON, LarkError, as_expression, balanced

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
SUM = """
// what people write into examples
start: expr
expr: term (SP ADD SP term)* -> add
    | term
?term: factor (SP MUL SP factor)* -> mul
factor.2: INT
SP: " "
ADD: "+"
MUL: "*"
%import common (INT, DIGIT)
"""


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        (PATCH, ["*** Begin Patch\n*** Add File: a/b.py\n+x = 1\n+\n*** End Patch",
                 "*** Begin Patch\n*** Update File: a\n@@ def f\n-a\n+b\n c\n*** Delete File: z\n*** End Patch\n"],
         ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+x\n*** End Patch", "x"]),
        (SUM, ["1", "1 + 2", "12 * 3 + 4 * 5"], ["", "1+2", "1 +", "a"]),
        ('start: "a"i "b" ~ 2..3 [C] D~2\nC: "x".."z"\nD: /[0-9]/', ["abb12", "Abbbx00"], ["abxx", "ab12"]),
        ('start: "(" "." "\\n" "\\u00e9" "\\\\" "\\"" ")"', ['(.\né\\")'], ["(x\né\\\")"]),
        ("start: /a\\/b|c/ \"d\"", ["a/bd", "cd"], ["a/b", "c"]),
        ('start: ("a"\n  | "b"\n)\n  | "c"', ["a", "b", "c"], ["", "ab"]),
        ("start: A B\nA: \"a\" | \"b\"\nB: A+", ["ab", "baa"], ["a"]),
        ('start: "é"i "ß"i', ["éß", "Éß"], ["eß"]),
        ("start: \"a\" // one\n# two\n\n\n  | \"b\"", ["a", "b"], ["ab"]),
    ],
)  # fmt: skip
def test_what_it_matches(source: str, yes: list[str], no: list[str]) -> None:
    made = re.compile(as_expression(source))
    assert [text for text in yes if not made.fullmatch(text)] == []
    assert [text for text in no if made.fullmatch(text)] == []


def test_common_terminals() -> None:
    right = {"INT": "12", "FLOAT": "1e5", "NUMBER": "1.5e-3", "CNAME": "_a1", "WS": " \n", "ESCAPED_STRING": '"a\\""'}
    for name, expression in COMMON.items():
        made = re.compile(as_expression(f"start: X\n%import common.{name} -> X"))
        assert made.pattern == expression and (name not in right or made.fullmatch(right[name]))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "no rule start"),
        ("other: /a/", "no rule start"),
        ('start: "a" start | "b"', "contains itself"),
        ("start: a\na: b\nb: a", "contains itself"),
        ("start: a", "nothing is called a"),
        ("start: /a/i", "flags"),
        ("start: /a)(/", "not in pairs"),
        ("start: ", ""),
        ("start: (", "too early"),
        ("start: )", "not expected"),
        ('start: "a" ~ 5000', "more often"),
        ('start: "a" ~ 3..2', "less than"),
        ('start: "ab".."c"', "range"),
        ('start: "c".."a"', "range"),
        ('start: "\\ud800"', "no character"),
        ("start: /a/\nstart: /b/", "twice"),
        ("%ignore /a/\nstart: /b/", "%ignore"),
        ("%import common.NOPE\nstart: /b/", "known: DIGIT"),
        ("%import other.X\nstart: /b/", "only common"),
        ("start{x}: x", "nothing that is known"),
        ("start: $", "nothing that is known"),
        ("start /a/", "colon"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "deeper"),
        ("".join(f"r{n}: r{n + 1}\n" for n in range(500)) + 'r500: "a"\nstart: r0', "deeper"),
        ("".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40: "a"\nstart: r0', "more than 4096"),
    ],
)
def test_what_is_refused(source: str, said: str) -> None:
    if not said:
        assert as_expression(source) == ""
        return
    with pytest.raises(LarkError) as error:
        as_expression(source)
    assert said in str(error.value)


def test_the_worst_sources_are_read_once() -> None:
    """Each is as long as it may be, and what comes out is bounded: a test of work, counted in characters made."""
    most = limits.MAX_LARK_CHARS
    for piece in ("\n", "a: /x/\n", '"a" ', "start: a|", "//", "(", "%import common.INT\n", "a ~ 1000 "):
        source = "start: /a/\n" + piece * ((most - 11) // len(piece))
        told = ""
        try:
            made = as_expression(source)
        except LarkError as error:
            made, told = "", str(error)
        assert len(made) <= limits.MAX_REGEX_CHARS and len(told) < 400


def test_parentheses_in_pairs() -> None:
    assert all(map(balanced, ("", "(a)", r"\(", "[(]", "(?:a|b)")))
    assert not any(map(balanced, ("(", ")(", "(a))", "a)")))
