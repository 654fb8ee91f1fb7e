"""Grammars that skip a text which begins like the one that is awaited: what they force never ends, so nothing is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

import pytest

from penstock.text.grammar.translate import translate

_LAYOUT: Final = {"whitespace_pattern": "1+"}
_TAG: Final = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": {}}, "end": ">"}
_ASKED: Final = 40
_FOLLOW: Final = """
import json, sys
import numpy as np
from penstock.structured import grammar_compiler

words = [bytes([byte]) for byte in range(256)] + [b"aa", b"aaa", b"  ", b""]
vocabulary = grammar_compiler.Vocabulary(
    len(words), words.__getitem__, lambda text: list(text.encode()), frozenset((259,)), (259,)
)
tokenizer = grammar_compiler.matcher_tokenizer(vocabulary)
first = grammar_compiler.compile_grammar(tokenizer, json.loads(sys.argv[1]))
row = np.zeros((len(words) + 31) // 32, np.uint32)
for spread in range(3):
    matcher, taken = first.deep_copy(), 0
    for taken in range(int(sys.argv[2])):
        grammar_compiler.compute_mask(matcher, row)
        allowed = [token for token in range(259) if row[token // 32] >> (token % 32) & 1]
        if matcher.is_error() or not allowed:
            break
        assert matcher.consume_token(allowed[taken * spread % len(allowed)]), matcher.get_error()
        matcher.compute_ff_tokens()
    assert not matcher.is_error(), matcher.get_error()
    print(spread, taken)
"""


def _list(*entries: dict[str, Any]) -> str:
    return json.dumps({"grammars": entries})


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", 'start: "x" " " "y"\n%ignore / +/'),
        ("lark", 'start: "x" "a"\n%ignore /a+/'),
        ("lark", 'start: "x" "a0"\n%ignore /a*/'),
        ("lark", '%llguidance {"allow_initial_skip": true, "no_forcing": false}\nstart: "a0"\n%ignore /a*/'),
        ("lark", 'start: "x" w\nw: %lark {\n start: "x" "a"\n %ignore /a+/\n}'),
        ("lark", 'start: %json {"const": [1], "x-guidance": {"whitesp\\u0061ce_pattern": "1+"}}'),
        ("lark", _list({"lark_grammar": "start: @n"}, {"name": "n", "lark_grammar": 'start: "x" "a"\n%ignore /a+/'})),
        ("lark", _list({"json_schema": {"const": [1], "x-guidance": _LAYOUT}})),
        ("json_schema", json.dumps({"const": [1], "x-guidance": _LAYOUT})),
        (
            "structural_tag",
            json.dumps({"format": _TAG | {"content": {
                "type": "json_schema", "json_schema": {"const": [1], "x-guidance": _LAYOUT}}}}),
        ),
    ],
)  # fmt: skip
def test_grammars_that_skip_what_they_await_are_followed_token_by_token(kind: str, source: str) -> None:
    """In a process of its own, as what forces for ever cannot be ended in any other way."""
    args = [sys.executable, "-c", _FOLLOW, json.dumps(translate(kind, source)), str(_ASKED)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_only_grammars_that_skip_a_text_of_their_own_are_not_forced() -> None:
    assert "no_forcing" not in translate("lark", 'start: "x" %json {"const": [1]}')
    assert "no_forcing" not in translate("json_schema", '{"x-guidance": {"whitespace_flexible": true}}')
    assert "no_forcing" not in translate("structural_tag", json.dumps({"format": _TAG}))
    assert "no_forcing" not in translate("lark", _list({"lark_grammar": 'start: "x"'}))
    skipping = 'start: "x" "a"\n%ignore /a+/'
    assert translate("lark", skipping).startswith(f"{skipping}\n")  # errors name the lines the client wrote
